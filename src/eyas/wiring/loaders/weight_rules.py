"""Where the tensors, head, embedding and vocabulary that an engine ends up with are not the draft's. No torch."""

from collections.abc import Iterator

from eyas.formats.problem import Problem
from eyas.formats.taps import IDS_KEY
from eyas.wiring.loaders.case import Case
from eyas.wiring.loaders.parameters import Fates, parameters
from eyas.wiring.loaders.view import NESTED_IDS, find


def keys_problems(case: Case) -> Iterator[Problem]:
    """Values on which the draft class fails."""
    read = case.view.reads["target_hidden_size"]
    null_is_fine = case.sglang and case.view.block == "mla"
    if read.where == "target_hidden_size" and read.value is None and not null_is_fine:
        found = "null, which is multiplied: TypeError at start"
        yield Problem("config_key_wrong", "target_hidden_size", "an integer, or no key", found, "remove the key")
    needs_key = case.sglang and case.view.block == "llama" and not case.view.get("tie_word_embeddings")
    if needs_key and "draft_vocab_size" not in case.raw:
        found = "absent: AttributeError at start"
        fix = "draft_vocab_size = the head's rows"
        yield Problem("config_key_missing", "draft_vocab_size", "the key", found, fix, "error")
    if case.sglang and case.view.get("tie_word_embeddings") and _own_head(case):
        found = "true: the embedding stands in for the draft's head, whose tensor is dropped"
        yield Problem("tied_head", "tie_word_embeddings", "false", found, "tie_word_embeddings = false")
    if case.sglang and case.view.block == "mla" and case.headers is None and case.view.get("q_lora_rank") is None:
        found = "absent: ValueError at start"
        yield Problem("config_key_missing", "q_lora_rank", "an integer", found, "write q_lora_rank", "error")
    yield from _sizes(case)
    yield from _unread_ids(case)
    yield from _layers(case)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "vocab_size", "draft_vocab_size")


def _sizes(case: Case) -> Iterator[Problem]:
    """Sizes that are there and are none."""
    for name in SIZES:
        read = case.view.reads[name]
        if read.where == name and read.value is not None and not (type(read.value) is int and read.value > 0):
            found = f"{read.value!r}, of which no tensor can be built"
            yield Problem("config_key_wrong", name, "a positive integer", found, f"write {name} as the tensors have it")


def _unread_ids(case: Case) -> Iterator[Problem]:
    """Layer ids where this engine looks, which are no list of integers."""
    both = case.view.engine.runner == "v1"
    for path in [NESTED_IDS] if case.sglang else [IDS_KEY, NESTED_IDS] if both else [IDS_KEY]:
        value = find(case.raw, [path]).value
        if value is not None and not (isinstance(value, list) and all(type(one) is int for one in value)):
            found = f"{value!r:.80}: no layer is ever compared equal to it, or the server stops"
            yield Problem(
                "config_key_wrong", path, "a list of integers", found, f"write {path} as numbers: [2, 15, 27]"
            )


def _own_head(case: Case) -> bool:
    """Whether the draft has a head of its own; without tensors a reduced vocabulary tells."""
    if case.headers is not None:
        return any(name.endswith("lm_head.weight") for name in case.headers)
    rows, total = case.view.get("draft_vocab_size"), case.view.get("vocab_size")
    return type(rows) is int and type(total) is int and rows < total


def _layers(case: Case) -> Iterator[Problem]:
    read, engine = case.view.reads["num_hidden_layers"], case.view.engine
    one_only = case.sglang and (case.view.block == "mla" or not engine.since("0.5.12"))
    if one_only and read.value != 1 and not read.where.startswith("absent"):
        found = f"{read.value}: ValueError at start"
        yield Problem("config_key_wrong", "num_hidden_layers", "1", found, "num_hidden_layers = 1, or another release")
    elif read.where.startswith("absent"):
        found = "absent: a LlamaConfig's own 32"
        yield Problem("config_key_missing", "num_hidden_layers", "the draft's layers", found, "write num_hidden_layers")
    elif type(read.value) is int and read.value > 8 and case.headers is None:
        found = f"{read.value}: as many draft layers are built"
        fix = "num_hidden_layers = the layers the checkpoint holds (1 as a rule)"
        yield Problem("config_key_wrong", "num_hidden_layers", "the draft's own layers", found, fix, "warning")


def embedding_problems(case: Case) -> Iterator[Problem]:
    hidden, target = case.view.get("hidden_size"), case.view.get("target_hidden_size")
    if case.sglang and case.eyas is not None and case.eyas.own_embedding and hidden == target:
        found = "the target's is put in its place, always"
        fix = "serve with vLLM, which keeps an embedding that differs, or train with the target's"
        yield Problem("embed_mismatch", "embed_tokens", "the draft's own embedding", found, fix)
    differs = type(hidden) is int and type(target) is int and hidden != target
    has_own = case.headers is None or any(name.endswith("embed_tokens.weight") for name in case.headers)
    if differs and not has_own:
        found = f"absent; the target's is {target} wide and cannot be shared"
        fix = "store the draft's own embedding"
        yield Problem("embed_mismatch", "embed_tokens.weight", f"one {hidden} wide", found, fix)


# Tensors ----------------------------------------------------------------------------------------------------------


def tensors_problems(case: Case) -> Iterator[Problem]:
    if case.fates is None:
        return
    yield from _unplaced(case, case.fates)
    yield from _unfilled(case, case.fates)
    yield from _shapes(case, case.fates)


def _unplaced(case: Case, fates: Fates) -> Iterator[Problem]:
    kinds = (
        (fates.dropped, "dropped in silence"),
        (fates.refused, "the server stops: no parameter of that name"),
    )
    for names, words in kinds:
        harmless = [n for n in names if n.endswith(("rotary_emb.inv_freq", "d2t")) or _unused_head(case, n)]
        biases = [name for name in names if name.endswith(".bias")]
        others = [name for name in names if name not in biases and name not in harmless]
        if biases:
            fix = "train without biases, or set the option they belong to"
            yield Problem("bias_dropped", "tensors", "biases that are read", f"{_some(biases)}: {words}", fix)
        if others:
            fix = "eyas export writes the names this engine reads"
            fix = fix if not _block_only(others) else "another engine or release: this block needs a class of its own"
            yield Problem("tensor_unexpected", "tensors", "names it knows", f"{_some(others)}: {words}", fix)
        if "d2t" in harmless and names is fates.refused:
            found = "d2t beside a whole vocabulary: from 0.32 no parameter takes it and the server stops"
            yield Problem("tensor_unexpected", "d2t", "no table", found, "leave d2t out of the checkpoint")


def _unused_head(case: Case, name: str) -> bool:
    """A tied head's own tensor: `tied_head` has said it."""
    return name.endswith("lm_head.weight") and bool(case.view.get("tie_word_embeddings"))


def _block_only(names: list[str]) -> bool:
    return all(".q_norm." in name or ".k_norm." in name for name in names)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _unfilled(case: Case, fates: Fates) -> Iterator[Problem]:
    missing = [name for name in fates.missing if name != "embed_tokens.weight"]
    if missing:
        found = f"{_some(missing)}: no tensor fills them, they stay random without a word"
        fix = "eyas export again from the training checkpoint; random weights are no substitute"
        yield Problem("tensor_missing", "tensors", f"{len(missing)} more parameters", found, fix)
    rows, total = case.view.get("draft_vocab_size"), case.view.get("vocab_size")
    has_table = "d2t" in fates.loaded.values()
    if not has_table and type(rows) is int and type(total) is int and rows < total:
        found = "absent: draft ids pass for target ids, acceptance near zero"
        yield Problem("d2t_missing", "d2t", "the table of the reduced vocabulary", found, "store d2t")


def _shapes(case: Case, fates: Fates) -> Iterator[Problem]:
    built, headers = parameters(case.view), case.headers or {}
    rows = case.view.get("draft_vocab_size")
    for name, parameter in fates.loaded.items():
        wanted = (rows,) if parameter == "d2t" and type(rows) is int else built.get(parameter)
        got = headers[name].shape
        if wanted is not None and got is not None and wanted != got:
            fix = "make config.json and the tensors agree"
            yield Problem("shape_mismatch", name, str(list(wanted)), f"{list(got)}: the server stops", fix)
    table = headers.get("d2t")
    if table is not None and table.dtype not in (None, "I64"):
        yield Problem("dtype_mismatch", "d2t", "I64", table.dtype, "store d2t as int64")
