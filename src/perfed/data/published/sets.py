"""The files of published data sets: their names, addresses and checksums."""

from collections.abc import Iterable

from perfed.data.published.download import FileFormat, PublishedFile, PublishedSet


def _idx_format(folders: tuple[str, ...], base: str, checksums: Iterable[str]) -> FileFormat:
    names = (
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    )
    pairs = zip(names, checksums, strict=True)
    return FileFormat("idx", tuple(PublishedFile(n, folders, base + n, c) for n, c in pairs))


def _format(kind: str, folders: tuple[str, ...], *names: str) -> FileFormat:
    return FileFormat(kind, tuple(PublishedFile(name, folders) for name in names))


MNIST = PublishedSet(
    "MNIST",
    (
        _idx_format(
            ("mnist", "MNIST/raw"),
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
)

FASHION_MNIST = PublishedSet(
    "Fashion-MNIST",
    (
        _idx_format(
            ("fashion-mnist", "FashionMNIST/raw"),
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "md5:25c81989df183df01b3e8a0aad5dffbe",
                "md5:bef4ecab320f06d8554ea6380940ec79",
                "md5:bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
)

CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR_PYTHON = ("cifar-10-batches-py", "cifar10/cifar-10-batches-py")
_CIFAR_BINARY = ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin")

CIFAR10 = PublishedSet(
    "CIFAR-10",
    (
        _format("npz", ("cifar10",), "cifar10_train.npz", "cifar10_test.npz"),
        _format("python", _CIFAR_PYTHON, *CIFAR_BATCHES),
        _format("python.tar", ("cifar10",), "cifar-10-python.tar.gz"),
        _format("binary", _CIFAR_BINARY, *(f"{batch}.bin" for batch in CIFAR_BATCHES)),
        # The one that is downloaded: plain bytes, no pickles.
        FileFormat(
            "binary.tar",
            (
                PublishedFile(
                    "cifar-10-binary.tar.gz",
                    ("cifar10",),
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
            ),
        ),
    ),
)

_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_QMNIST_FOLDERS = ("qmnist", "QMNIST/raw", "mnist", "MNIST/raw")

MNIST_WRITERS = PublishedSet(
    "MNIST's list of writers",
    (
        _format("npz", ("mnist", "MNIST/raw", "qmnist"), "mnist_writers.npz"),
        FileFormat(
            "qmnist",
            (
                PublishedFile(
                    "qmnist-train-labels-idx2-int.gz",
                    _QMNIST_FOLDERS,
                    _QMNIST + "qmnist-train-labels-idx2-int.gz",
                    "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
                ),
                PublishedFile(
                    "qmnist-test-labels-idx2-int.gz",
                    _QMNIST_FOLDERS,
                    _QMNIST + "qmnist-test-labels-idx2-int.gz",
                    "md5:5b5b05890a5e13444e108efe57b788aa",
                ),
            ),
        ),
    ),
)

SHAKESPEARE = PublishedSet(
    "Shakespeare",
    (
        _format("text", ("shakespeare",), "tinyshakespeare.txt.gz"),
        FileFormat(
            "text",
            (
                PublishedFile(
                    "input.txt",
                    ("shakespeare",),
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                ),
            ),
        ),
    ),
)
