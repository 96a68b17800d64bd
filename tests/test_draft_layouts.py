"""One draft in every layout that engines and trainers write: the engine drafts and decodes the same with each."""

from pathlib import Path

import pytest
import torch

from eyas.engine.generate import Engine
from eyas.export.folder import export_draft
from eyas.measure.bench import bench
from eyas.models.checkpoint import load_draft, make_info, save_draft
from eyas.models.foreign import name_target
from eyas.models.target import load_target
from eyas.recipe import BenchSettings, TargetSettings
from eyas.settings import DraftingSettings
from test_drafting import told
from test_engine import prompts
from test_foreign import BOTH, made_elsewhere
from tiny import save_tiny_target

TREE = DraftingSettings(num_steps=3, topk=3, num_draft_tokens=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def layouts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ours, our export (SGLang's and vLLM's layout), SpecForge's (SGLang's layout) and speculators'."""
    folder = tmp_path_factory.mktemp("layouts")
    draft = made_elsewhere(folder / "specforge", "specforge")
    assert torch.equal(made_elsewhere(folder / "speculators", "speculators").fc.weight, draft.fc.weight)
    whole = load_target(str(target))
    hashes = {"tokenizer_hash": whole.tokenizer_hash, "template_hash": whole.template_hash or ""}
    save_draft(folder / "ours", draft, make_info(draft, whole.identity, ttt_length=3, **hashes))
    export_draft(folder / "ours", folder / "export", BOTH)
    return {name: folder / name for name in ("ours", "export", "specforge", "speculators")}


def test_every_layout_drafts_the_same_tokens_and_gives_the_same_text(target: Path, layouts: dict[str, Path]) -> None:
    loaded, found = load_target(str(target)), {}
    ids, prompt = prompts(4)[3], prompts(3)[2]
    for name, folder in layouts.items():
        draft, _ = load_draft(folder, loaded.embedding, torch.float32, name_target(str(target)))
        with torch.inference_mode():
            trees = [told(loaded, draft, TREE, ids[:count]).propose(3) for count in range(2, 10)]
        engine = Engine(loaded, draft, drafting=TREE, kernels="torch", announce=False)
        run = engine.generate(prompt, 24, 3, ignore_eos=True)
        engine.close()
        found[name] = (trees, run.ids, run.rounds)
    assert len({len(tree.tokens) for tree in found["ours"][0]}) == 1
    assert len(set(found["ours"][0])) > 1, "the trees say something"
    assert all(result == found["ours"] for result in found.values())


def test_a_foreign_folder_is_benched_as_it_is(target: Path, layouts: dict[str, Path]) -> None:
    settings = BenchSettings(
        limit=2, max_new_tokens=8, precision="float32", num_steps=2, topk=2, equality_limit=2, temperature=0.8
    )
    result = bench(TargetSettings(name=str(target)), layouts["speculators"], settings)
    assert result["identical_outputs"] is True
    assert result["valid_outputs"] is True
    assert result["drafting"]["topk"] == 2
    assert result["sampling"]["temperature"] == 0.8
    assert result["speculative"]["depths"] == {"2": result["speculative"]["rounds"]}


def test_ngrams_are_benched_without_a_draft_and_simulated_acceptance_says_what_it_is(
    target: Path, layouts: dict[str, Path]
) -> None:
    settings = BenchSettings(limit=2, max_new_tokens=12, ngram=3, equality_limit=1)
    result = bench(TargetSettings(name=str(target)), None, settings)
    assert (result["identical_outputs"], result["precision"], result["predicted"]) == (True, "float32", None)
    settings = BenchSettings(
        limit=2, max_new_tokens=40, precision="float32", num_steps=3, simulate=(1.0, 1.0, 0.0), adaptive=True
    )
    result = bench(TargetSettings(name=str(target)), layouts["ours"], settings)
    assert (result["valid_outputs"], result["identical_outputs"]) == (False, None)
    assert result["round_costs"]["draft"].keys() == {0, 1, 2, 3}
    assert result["baseline"]["output_tokens"] == result["speculative"]["output_tokens"] == 2 * 39
