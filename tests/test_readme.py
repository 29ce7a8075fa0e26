"""The README's first example runs as it stands, and its printed output is the real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|[▁▂▃▄▅▆▇█]")


def test_first_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["python", "text"]
    code, shown = blocks[0][1], blocks[1][1]
    calls = "hp.score", "hp.select", "hp.prune_", "hp.save_pretrained", "hp.from_pretrained"
    assert all(call in code for call in calls)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    # Rounding differs between processors: the words and counts must be the same, the measured
    # figures near.
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    real, said = (
        dict(re.findall(r"(trained|pruned|recovered) +(0\.\d+)", text)) for text in (printed, shown)
    )
    for name in ("trained", "pruned", "recovered"):
        assert abs(float(real[name]) - float(said[name])) < 0.04, (name, real, said)
