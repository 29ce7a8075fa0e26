"""``push_to_hub`` and ``prune --push``, with a stand-in for the hub's API that keeps a folder.

That is ours, and those of a cut model and of the Trainer, which Transformers wrote.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import transformers
from huggingface_hub.utils import EntryNotFoundError, filter_repo_objects
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import CheckpointError, InvalidValue, NotWritten
from headprune.core.record import Proof, QualityRow, SpeedRow
from headprune.layouts import registry
from tests.command_line import done, refused

NAME = "someone/small"


class Hub:
    """Repositories as folders; calls must have the arguments of the real API."""

    def __init__(self, home):
        self.home = home
        self.user = "someone"
        self.private = None

    def whoami(self, api):
        if self.user is None:
            raise OSError("Token is required")
        return {"name": self.user}

    def create_repo(self, api, name, private, exist_ok, token=None):
        self.private = private
        (self.home / name).mkdir(parents=True, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=name)

    def upload_folder(
        self,
        api,
        repo_id,
        folder_path,
        commit_message,
        ignore_patterns,
        delete_patterns=None,
        **of_trainer,
    ):
        assert commit_message
        repository = self.home / repo_id
        for name in filter_repo_objects(files(repository), allow_patterns=delete_patterns or []):
            (repository / name).unlink()
        for name in filter_repo_objects(files(Path(folder_path)), ignore_patterns=ignore_patterns):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder_path) / name, repository / name)
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")

    def create_commit(self, api, repo_id, operations, **of_call):
        for operation in operations:
            shutil.copyfile(operation.path_or_fileobj, self.home / repo_id / operation.path_in_repo)

    def card(self, name, *rest, **of_call):
        if not (self.home / name / "README.md").is_file():
            raise EntryNotFoundError("no card")
        return str(self.home / name / "README.md")


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in found]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    found = Hub(tmp_path / "hub")
    for name in ("whoami", "create_repo", "upload_folder", "create_commit"):
        real = getattr(huggingface_hub.HfApi, name)
        stand_in = create_autospec(real, side_effect=getattr(found, name))
        monkeypatch.setattr(huggingface_hub.HfApi, name, stand_in)
    monkeypatch.setattr(huggingface_hub.repocard, "hf_hub_download", found.card)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(found.home / name))
    return found


def cut():
    model, batch = registry.get("llama").tiny(0)
    sites = hp.find_sites(model)
    keep = {s.name: [h for unit in s.units[i % 2 :] for h in unit] for i, s in enumerate(sites)}
    plan = hp.PruningPlan(hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}))
    hp.prune_(model, plan, example=batch)
    return model.eval(), batch, plan


def test_the_repository_opens_by_its_name_and_its_card_says_all(hub):
    model, batch, plan = cut()
    scores = hp.score(model, [batch], "taylor")
    record = hp.RunRecord(
        *("a run", "done", "report", "2026-01-01"),
        plan=plan,
        scores=scores,
        quality=(QualityRow("taylor", 9, "accuracy", 0.75, "test", 200, 0.5, 3, 0.01),),
        speed=(SpeedRow(8, 128, 0.2, 0.2, 0.1, 0.1, 2.0, 1.9, 2.1, 10),),
        proofs=(Proof("outputs", 1e-6, 2.0, 1e-5, "float32", 4),),
    )
    address = hp.push_to_hub(model, NAME, record=record, licence="mit", private=True)
    assert (address, hub.private) == (f"https://hub.example/{NAME}/commit/1", True)
    text = (hub.home / NAME / "README.md").read_text()
    assert "\nlicense: mit\n" in text.partition("# ")[0]
    for words in (
        "- Licence: mit",
        "- Plan: selector by hand",
        "- Proof of outputs: largest difference 1.0e-06, allowed 1.0e-05; 4 examples in float32",
        "- Speed: ",
        "| taylor | 9 | accuracy | 0.7500 ± 0.0100 | 200 test |",
        f"    {str(scores).splitlines()[0]}",
        f"model = hp.from_pretrained('{NAME}')",
    ):
        assert words in text, words
    loaded = hp.from_pretrained(NAME)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_second_push_replaces_what_the_first_one_wrote(hub, tmp_path):
    model, _, _ = cut()
    hp.push_to_hub(model, NAME, max_shard_size="10KB")
    repository = hub.home / NAME
    assert "- Licence: not stated here" in (repository / "README.md").read_text()
    (repository / "notes.txt").write_text("of its owner")
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model.config._name_or_path = str(base)
    hp.push_to_hub(model, NAME, format="remote-code")
    expected = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert set(files(repository)) == {*expected, "modeling_headprune_llama.py", "notes.txt"}
    assert "- Licence: apache-2.0" in (repository / "README.md").read_text()


def test_prune_pushes_what_it_writes_without_the_run(hub, tmp_path):
    model, _ = registry.get("llama").tiny(0)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\nWords.\n")
    cut()[2].save(tmp_path / "plan.json")
    out, base = tmp_path / "out", tmp_path / "base"
    for more in ("", "--streaming"):
        shutil.rmtree(out, ignore_errors=True)
        command = f"prune --model {base} --plan {tmp_path}/plan.json --out {out} --push {NAME}"
        said = done(f"{command} {more}").stdout
        assert f"uploaded to https://hub.example/{NAME}/commit/1" in said
        text = (hub.home / NAME / "README.md").read_text()
        assert "license: mit" in text
        assert ("- Proof of " in text) == (more == "")
    (out / "run").mkdir()
    (out / "run" / "record.json").write_text("{}")
    hp.checkpoints.hub.upload(out, NAME)
    assert "run/record.json" not in files(hub.home / NAME)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("by", "pushed_before"), [("model", True), ("Trainer", False)])
def test_what_transformers_pushes_opens_by_its_name(by, pushed_before, hub, tmp_path):
    model, _, _ = cut()
    if pushed_before:  # Transformers removes no file of a repository
        hp.push_to_hub(model, NAME)
        hp.prune_heads_(model, {1: [0, 1]})
    if by == "model":
        model.push_to_hub(NAME)
    else:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), hub_model_id=NAME, use_cpu=True, report_to=[]
        )
        transformers.Trainer(model, arguments).push_to_hub()
    loaded = hp.from_pretrained(NAME)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert [s.heads for s in hp.find_sites(loaded)] == [s.heads for s in hp.find_sites(model)]


def test_what_the_hub_would_refuse_is_refused_before_any_work(hub, tmp_path):
    model, _, plan = cut()
    plan.save(tmp_path / "plan.json")
    for name in ("small", "a/b/c", "someone/sm--all"):
        with pytest.raises(InvalidValue, match="name: must be a repository, owner/name"):
            hp.push_to_hub(model, name)
    prune = f"prune --model {tmp_path} --plan {tmp_path}/plan.json --out {tmp_path}/out"
    model.save_pretrained(tmp_path)
    assert "--private: must be given with --push only" in refused(f"{prune} --private")
    assert "--push: must be a repository, owner/name" in refused(f"{prune} --push small")
    hub.user = None
    with pytest.raises(NotWritten, match=r"Token is required. Log in: hf auth login"):
        hp.push_to_hub(model, NAME)
    hub.user = "someone"
    huggingface_hub.HfApi.upload_folder.side_effect = OSError("403 Forbidden")
    with pytest.raises(NotWritten, match="that you may write to, got 403 Forbidden"):
        hp.push_to_hub(model, NAME)


def test_a_repository_that_cannot_be_reached(monkeypatch):
    with pytest.raises(CheckpointError, match="or a repository of the hub that can be reached"):
        hp.from_pretrained("nobody/nothing")
