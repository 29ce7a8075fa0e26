"""What the fork server of `killing` imports before it forks, for `processes` too."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = os.environ[
    "HF_DATASETS_OFFLINE"
] = "1"

import matplotlib

import headprune.recovery._training
import headprune.run.on_data
import headprune.run.runner
import headprune.sweep.sweeping  # noqa: F401
from tests import killing, processes_work  # noqa: F401

matplotlib.use("agg")
