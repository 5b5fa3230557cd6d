"""Two host devices whatever the machine, and no compiled programs from earlier runs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PERFED_DEVICES"] = "2"
os.environ["PERFED_CACHE"] = ""
