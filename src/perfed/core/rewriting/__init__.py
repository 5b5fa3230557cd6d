"""Models as they come from other libraries, computed by operations that are fast for many clients.

Vectorized over clients with their own weights, an ordinary convolution is one of the slowest
operations there is: on a CPU a naive loop, at a fiftieth of the speed of a matrix product, and on a
GPU a grouped one. So a model is traced, and its convolutions are done as products of the patches
that they visit, its pooling as comparisons of strided parts (`windows`); channels stay last in
memory from one to the next, whatever the model's own order is (`layouts`); a matrix with a low-rank
adapter is never formed (`low_rank`); what nobody reads of a last layer is not computed
(`narrowing`); and a softmax is differentiated as one (`softmax`).
"""

from perfed.core.rewriting.interpreter import rewrite
from perfed.core.rewriting.low_rank import low_rank_sum
from perfed.core.rewriting.review import Review, review

__all__ = ["Review", "low_rank_sum", "review", "rewrite"]
