"""What a run starts from: samples, stored or made beside it, and a draft, new or somebody's.

Shapes: V target vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor

from eyas.data.online import TargetSamples
from eyas.data.shards import CaptureReader, Samples
from eyas.errors import InputError
from eyas.models.checkpoint import DraftInfo, has_info, load_draft, make_info, read_info
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget
from eyas.models.target import DTYPES, Target, fastest_dtype, load_target
from eyas.models.vocab import build_vocab, coverage
from eyas.progress import say
from eyas.recipe import NOT_COMPARED, CaptureSettings, DraftSettings, TargetSettings, TrainSettings
from eyas.run import JSON, Manifest, hash_file, manifest_hash
from eyas.shipped import draft_folder
from eyas.stage import PROGRESS, Stage, begin, chosen_step, flat
from eyas.training.distributed import Ranks
from eyas.training.foresee import check_ours, check_shape
from eyas.training.initialise import draft_config, expected_counts, new_draft, special_ids
from eyas.training.least_squares import unfit


def opened(ranks: Ranks, data: Path, kind: str, out: Path, settings: JSON, train: TrainSettings) -> Stage:
    """The stage's folder as the first process begins it, and as the others follow it: without its lock.

    Raises InputError where they were started with different settings or data, or do not see one folder.
    """
    uncompared = {f"train.{name}": getattr(train, name) for name in NOT_COMPARED}
    made_with = {f"the {kind}": manifest_hash(data), "torch": torch.__version__, "device": ranks.device.type}
    ranks.check_same({**flat(settings), **uncompared, **made_with}, data)
    if ranks.leads:
        stage = begin(out, "draft", settings, {kind: data})
        ranks.share((stage.complete, stage.decided))
        return stage
    complete, decided = ranks.share((None, {}))
    if complete is None and not (out / PROGRESS).is_file():
        raise InputError(
            wanted="an --out that every process sees: the first one writes the checkpoints that all resume from",
            got=f"no {PROGRESS} in it here",
            where=str(out.absolute()),
            next="give an --out on a disk that all machines share",
        )
    return Stage(out, "draft", settings, {kind: data}, complete, decided)


def precision(settings: TrainSettings, device: torch.device) -> str:
    """The dtype of the matrix products; weights, sums and the optimiser are float32 always."""
    wanted = settings.precision
    if wanted == "auto" and device.type == "cuda":
        return "bfloat16"
    return wanted if wanted != "auto" else next(name for name, dtype in DTYPES.items() if dtype == fastest_dtype(256))


def open_samples(
    data: Path, manifest: Manifest, target: Target, named: TargetSettings, capture: CaptureSettings, stage: Stage
) -> Samples:
    """The samples of a captures folder; of a responses folder with their states made by the target, as `capture` says.

    What `auto` measured at the first start (`stage.decided`) holds for every resumption.
    """
    if manifest.stage == "captures":
        return CaptureReader(data)
    dtype = DTYPES[stage.decided["capture_precision"]]
    same = dtype == target.dtype
    runner = target if same else load_target(named.name, dtype=dtype, trust_remote_code=named.trust_remote_code)
    runner.to(target.embedding.device)
    return TargetSamples(data, manifest, runner, capture)


def starting_draft(
    target: Target,
    samples: Samples,
    manifest: Manifest,
    counts_V: Tensor,
    settings: TrainSettings,
    shape: DraftSettings,
) -> tuple[Draft, DraftInfo]:
    """The draft before its first step, and its `eyas` block."""
    if settings.start_from is None:
        config = draft_config(target, samples.boundaries, shape)
        reduced = config.draft_vocab_size < target.vocab_size
        if config.draft_vocab_size < shape.vocab_size:
            wide = f"draft.vocab_size = {shape.vocab_size} exceeds the target's vocabulary"
            say(f"train: {wide}: {target.vocab_size}, nothing reduced")
        expected_V = expected_counts(target, samples, samples.of_split("train")) if reduced else None
        draft = new_draft(target, config, counts_V, settings.initialise, settings.seed, expected_V)
    else:
        draft = somebodys_draft(draft_folder(settings.start_from), target, samples, manifest, shape)
        say_coverage(draft, target, counts_V)
    settings.check_method(draft.config.method, settings.start_from or "draft.method")
    info = make_info(
        draft,
        target.identity,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        ttt_length=settings.ttt_length,
        loss_on=settings.loss_on,
        last_hidden_norm=samples.last_hidden_norm,
    )
    return draft, info


def from_least_squares(settings: TrainSettings, draft: Draft) -> bool:
    """Whether a run's new draft starts so; where its shape has no such start, the target's head is what is left."""
    if settings.initialise != "least_squares" or settings.start_from is not None:
        return False
    if (reason := unfit(draft)) is not None:
        say(f"train: {reason}: starts from the target's head alone")
    return reason is None


def checksums(folder: Path) -> dict[str, str]:
    """Of a draft folder's config and weights: file name to checksum."""
    held = sorted(path for path in chosen_step(folder).iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
    return {path.name: hash_file(path) for path in held}


def say_start(stage: Stage, folder: Path) -> None:
    """Say it where `folder`, which a run names as its start, holds another draft now than when the run began."""
    began = (stage.complete.facts if stage.complete else stage.decided).get("start")
    if began is not None and folder.is_dir() and checksums(folder) != began:
        say(f"train: {stage.folder} began from another draft than {folder} holds now; another --out goes on from that")


def somebodys_draft(folder: Path, target: Target, samples: Samples, manifest: Manifest, shape: DraftSettings) -> Draft:
    """A draft to go on from: ours, or EAGLE's, SpecForge's, speculators' or ModelOpt's, its vocabulary map kept.

    Raises InputError, with the finding's code, for a draft of another target, taps, tokenizer or norm state, for one
    that is not of the shape asked for, and for a map that leaves out a stop token. Of a draft made elsewhere only what
    its file says can be compared.
    """
    if has_info(folder):
        info = read_info(folder)
        check_ours(info, samples.boundaries, samples.last_hidden_norm, manifest.facts, folder)
        if info.template_hash != manifest.facts["template_hash"]:
            say(f"train: {folder} was trained under another chat template (template_mismatch): it now learns this one")
    named = NamedTarget(target.identity, target.context_length, target.embedding)
    draft, _ = load_draft(folder, target.embedding, torch.float32, named, samples.boundaries)
    check_shape(draft.config, shape, folder)
    lost = [stop for stop in target.stop_ids if not draft.t2d[stop]]
    if lost:
        raise InputError(
            wanted=f"a draft vocabulary that holds the stop tokens {list(target.stop_ids)}",
            got=f"{lost} left out: the end of an answer could never be drafted",
            where=f"{folder}: t2d",
            next="train a new draft: its map keeps them",
            code="vocab_mismatch",
        )
    return draft.to(target.embedding.device)


def say_coverage(draft: Draft, target: Target, counts_V: Tensor) -> None:
    """How well a map made for other answers fits these."""
    fresh_V = build_vocab(counts_V, draft.config.draft_vocab_size, special_ids(target, counts_V))[1]
    say(
        f"train: the draft's own vocabulary holds {coverage(counts_V, draft.t2d.cpu()):.1%} of the supervised tokens; "
        f"one made of them would hold {coverage(counts_V, fresh_V):.1%}"
    )


def trainable(draft: Draft, head: str) -> Draft:
    """In training mode, everything moved but a shared embedding and a frozen head."""
    draft.train().requires_grad_(True)
    draft.lm_head.weight.requires_grad_(head == "trained")
    draft.embed_tokens.weight.requires_grad_(draft.config.own_embedding)
    return draft
