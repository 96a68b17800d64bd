"""What is known of a run before it begins: how long it is, what it goes on from, and what it would refuse."""

from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.data.captures import survey
from eyas.data.responses import RESPONSES
from eyas.data.shards import CaptureReader, NormState
from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.models.checkpoint import DraftInfo, has_info, look_at, read_info
from eyas.models.resolve import local_folder
from eyas.models.target import Target, outline_target
from eyas.recipe import CaptureSettings, DraftSettings, TargetSettings, TrainSettings, recorded_training
from eyas.run import JSON, Manifest, check_same, is_complete, read_manifest
from eyas.shipped import draft_folder
from eyas.stage import check_file, standing, step_number
from eyas.training.batches import steps_over
from eyas.training.initialise import draft_config
from eyas.training.inputs import check_draft, check_maker, check_taps
from eyas.training.trainer_state import step_folders

SHAPE = set(DraftSettings.model_fields) & set(DraftConfig.model_fields)
"""Settings of a new draft that another's config answers under the same name."""
NORM_CODES = {"before": "teacher_double_normed", "after": "teacher_not_normed"}
"""What a teacher of the draft's norm state would be over states of the other one."""


def foreseen(
    data: Path,
    out: Path,
    settings: TrainSettings,
    shape: DraftSettings,
    target: TargetSettings,
    capture: CaptureSettings,
    online: bool,
) -> JSON:
    """`state` of `out` (new, unfinished, complete), the newest `step` that an unfinished one holds, and, where `data`
    are complete, `run`: train `samples`, and over all epochs `tokens` and `steps`, fewer where it stops early; `notes`
    where they are not. `online`: whether `data` are, or will be, responses.

    Raises InputError where `train` would, as far as that is known without the target.
    """
    manifest = read_manifest(data) if is_complete(data) else None
    online = online if manifest is None else data_is_online(manifest, settings, data)
    recorded = recorded_training(
        settings.model_copy(update={"online": online}), shape, target, capture if online else None
    )
    state = standing(out, "draft", recorded, {"responses" if online else "captures": data})
    steps, here = step_folders(out), local_folder(target.name)
    notes = [f"{target.name} is not on this machine, or not converted yet: it is not looked at"] if here is None else []
    if settings.device == "cuda" and not torch.cuda.is_available():
        notes.append("train.device = cuda, and this machine has no GPU: the run is refused here")
    if not steps and state != "complete":
        outline = outline_target(str(here), trust_remote_code=target.trust_remote_code) if here is not None else None
        check_start(settings, shape, manifest, capture, outline, data)
    if manifest is None:
        notes.append(f"{data} is not there yet, or unfinished: what the run comes to is not known")
    known: JSON = {"state": state} | ({"step": step_number(steps[-1])} if state == "unfinished" and steps else {})
    run = {} if manifest is None else {"run": extent(data, manifest, settings, capture)}
    return known | run | ({"notes": notes} if notes else {})


def extent(data: Path, manifest: Manifest, settings: TrainSettings, capture: CaptureSettings) -> JSON:
    """What a run on `data` comes to, by its samples' lengths alone."""
    if manifest.stage == "responses":
        entries = survey(check_file(data, RESPONSES, manifest), capture)[0]
    else:
        entries = CaptureReader(data).samples
    lengths, chosen = [one.length for one in entries], [n for n, one in enumerate(entries) if one.split == "train"]
    steps = steps_over(lengths, chosen, settings) if chosen else []
    tokens = sum(lengths[index] for batches in steps for indices in batches for index in indices)
    return {"samples": len(chosen), "tokens": tokens, "steps": len(steps)}


def data_is_online(manifest: Manifest, settings: TrainSettings, data: Path) -> bool:
    """Whether `data` are responses, whose states the target must make. Raises InputError for any other stage's folder,
    and for captures under `train.online`."""
    wanted = ("responses",) if settings.online else ("captures", "responses")
    if manifest.stage not in wanted:
        raise InputError(
            wanted=f"a {' or '.join(wanted)} folder",
            got=f"a {manifest.stage} folder",
            where=str(data),
            next="--responses RESPONSES trains online, --captures CAPTURES on stored states (--set train.online=false)",
        )
    return manifest.stage == "responses"


def check_start(
    settings: TrainSettings,
    shape: DraftSettings,
    data: Manifest | None,
    capture: CaptureSettings,
    target: Target | None,
    where: Path,
) -> None:
    """Raise InputError for a start that `train` would refuse, as far as settings, the draft to go on from, the
    manifest of its data (in `where`) and the target's outline show: asked before anything is loaded or written.

    `capture`: of states made beside the training, or still to be captured.
    """
    if data is not None and target is not None:
        check_maker(data, target, where)
    boundaries = taps_of(data, capture, target)
    if settings.start_from is None:
        settings.check_method(shape.method, "draft.method")
        if target is not None and boundaries is not None:
            draft_config(target, boundaries, shape)
        return
    if "initialise" in settings.model_fields_set and settings.initialise != "least_squares":
        raise InputError(
            wanted="a new draft to initialise",
            got=f"{settings.initialise}, beside a draft to go on from: {settings.start_from}",
            where="train.initialise",
            next="leave out --set train.initialise, or --set train.start_from",
        )
    folder = draft_folder(settings.start_from)
    look_at(folder)
    if not has_info(folder):
        return
    info = read_info(folder)
    settings.check_method(info.draft.method, str(folder))
    if data is not None and data.stage == "captures":
        check_ours(info, data.facts["boundaries"], data.facts["last_hidden_norm"], data.facts, folder)
    elif boundaries is not None:
        check_taps(info.draft.boundaries, boundaries, folder)
    check_shape(info.draft, shape, folder)


def taps_of(data: Manifest | None, capture: CaptureSettings, target: Target | None) -> Sequence[int] | None:
    """The boundaries that are captured, or will be; None where nothing says of how many layers."""
    if data is not None and data.stage == "captures":
        return data.facts["boundaries"]
    if target is not None:
        return capture.boundaries_of(target.num_hidden_layers)
    return None if data is None else capture.boundaries_of(data.facts["target"]["num_hidden_layers"])


def check_ours(info: DraftInfo, boundaries: Sequence[int], norm: NormState, facts: JSON, folder: Path) -> None:
    """Raise InputError, with the finding's code, for a draft of ours to go on from that is of another target, taps,
    tokenizer or norm state than the data. Another chat template can be learnt."""
    advice = "give a draft of this target and its captures (eyas inspect DRAFT), or leave out train.start_from"
    check_draft(info.model_copy(update={"template_hash": facts["template_hash"]}), boundaries, facts, folder)
    wanted = info.last_hidden_norm
    check_same("last_hidden_norm", wanted, norm, folder, advice, NORM_CODES[wanted])


def check_shape(config: DraftConfig, shape: DraftSettings, folder: Path) -> None:
    """Raise InputError where a setting that was made (not a default) asks for another shape than the draft has."""
    advice = "leave it out: a draft that is gone on from keeps its shape"
    made = {name: getattr(shape, name) for name in sorted(shape.model_fields_set)}
    for name, wanted in made.items():
        if name == "vocab_size":
            wanted = min(shape.vocab_size, config.vocab_size)
            check_same("draft.vocab_size", wanted, config.draft_vocab_size, folder, advice)
        elif name in SHAPE and wanted is not None:
            check_same(f"draft.{name}", wanted, getattr(config, name), folder, advice)
