"""The TTT forward, mask and loss by loops, from the words of docs/training.md: slow, obvious, and sharing no code with
`eyas.training`. One row at a time, one head at a time, one document at a time."""

import math

import torch
from torch import Tensor

from eyas.models.draft import Draft


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x_E: Tensor, position: int, theta: float) -> Tensor:
    width = len(x_E)
    half = width // 2
    angles = torch.tensor([position * theta ** (-2 * i / width) for i in range(half)])
    first, second = x_E[:half], x_E[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def rotate_pairs(x_P: Tensor, position: int, theta: float) -> Tensor:
    """DeepSeek's layout: (x0, x1), (x2, x3), ... are the pairs, each turned by one angle and left in place."""
    turned = []
    for i in range(len(x_P) // 2):
        angle = position * theta ** (-2 * i / len(x_P))
        a, b = x_P[2 * i], x_P[2 * i + 1]
        turned += [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
    return torch.stack(turned)


class Oracle:
    """A one-layer draft, row by row."""

    def __init__(self, draft: Draft) -> None:
        self.config = draft.config
        self.weights = {name: parameter for name, parameter in draft.named_parameters()}
        self.draft = draft

    def w(self, name: str) -> Tensor:
        return self.weights[f"layers.0.{name}.weight"]

    def fuse(self, taps_A: Tensor) -> Tensor:
        config = self.config
        if config.norm_before_fc:
            taps_A = rms(taps_A, self.weights["input_norm.weight"], config.rms_norm_eps)
        if config.fc_norm:
            pieces = taps_A.split(config.target_hidden_size)
            taps_A = torch.cat(
                [rms(x, self.weights[f"fc_norm.{i}.weight"], config.rms_norm_eps) for i, x in enumerate(pieces)]
            )
        return self.weights["fc.weight"] @ taps_A

    def attention_input(self, state_H: Tensor, token: int) -> tuple[Tensor, Tensor]:
        eps = self.config.rms_norm_eps
        normed = rms(state_H, self.w("hidden_norm"), eps)
        embed = rms(self.draft.embed_tokens.weight[token], self.w("input_layernorm"), eps)
        return torch.cat([embed, normed]), normed if self.config.norm_before_residual else state_H

    def key_value(self, state_H: Tensor, token: int, position: int) -> tuple[list[Tensor], list[Tensor]]:
        """One key and one value a key head."""
        x, _ = self.attention_input(state_H, token)
        if self.config.block == "mla":
            return self.latent_key_value(x, position)
        width = self.config.head_dim
        keys = (self.w("self_attn.k_proj") @ x).split(width)
        values = (self.w("self_attn.v_proj") @ x).split(width)
        if self.config.block == "qwen3":
            keys = tuple(rms(key, self.w("self_attn.k_norm"), self.config.rms_norm_eps) for key in keys)
        return [rotate(key, position, self.config.rope_theta) for key in keys], list(values)

    def latent_key_value(self, x_I: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        shape, eps, theta = self.config.latent, self.config.rms_norm_eps, self.config.rope_theta
        down = self.w("self_attn.kv_a_proj_with_mqa") @ x_I
        latent = rms(down[: shape.kv_lora_rank], self.w("self_attn.kv_a_layernorm"), eps)
        shared = rotate_pairs(down[shape.kv_lora_rank :], position, theta)
        heads = (self.w("self_attn.kv_b_proj") @ latent).split(shape.qk_nope_head_dim + shape.v_head_dim)
        keys = [torch.cat([head[: shape.qk_nope_head_dim], shared]) for head in heads]
        return keys, [head[shape.qk_nope_head_dim :] for head in heads]

    def queries(self, x_I: Tensor, position: int) -> list[Tensor]:
        """One query a head, normed and rotated."""
        config, eps = self.config, self.config.rms_norm_eps
        if config.block == "mla":
            shape = config.latent
            latent = rms(self.w("self_attn.q_a_proj") @ x_I, self.w("self_attn.q_a_layernorm"), eps)
            width, plain = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.qk_nope_head_dim
            heads = (self.w("self_attn.q_b_proj") @ latent).split(width)
            return [torch.cat([h[:plain], rotate_pairs(h[plain:], position, config.rope_theta)]) for h in heads]
        heads = (self.w("self_attn.q_proj") @ x_I).split(config.head_dim)
        if config.block == "qwen3":
            heads = tuple(rms(head, self.w("self_attn.q_norm"), eps) for head in heads)
        return [rotate(head, position, config.rope_theta) for head in heads]

    def step(self, state_H: Tensor, token: int, position: int, seen: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        """h before the norm; `seen` are keys and values of everything visible, the row's own included."""
        config = self.config
        x, residual = self.attention_input(state_H, token)
        group = config.num_attention_heads // config.num_key_value_heads
        context = []
        for head, query in enumerate(self.queries(x, position)):
            scores = torch.stack([query @ keys[head // group] / math.sqrt(len(query)) for keys, _ in seen])
            shares = scores.softmax(0)
            context.append(sum(share * values[head // group] for share, (_, values) in zip(shares, seen, strict=True)))
        state = residual + self.w("self_attn.o_proj") @ torch.cat(context)
        x = rms(state, self.w("post_attention_layernorm"), config.rms_norm_eps)
        gate = torch.nn.functional.silu(self.w("mlp.gate_proj") @ x)
        return state + self.w("mlp.down_proj") @ (gate * (self.w("mlp.up_proj") @ x))

    def logits(self, hidden_H: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ rms(hidden_H, self.weights["norm.weight"], self.config.rms_norm_eps)

    def document(self, taps_LA: Tensor, ids: list[int], steps: int) -> dict[tuple[int, int], Tensor]:
        """Logits of each (row, step) whose input token exists."""
        rows = range(len(ids) - 1)
        states = [self.fuse(taps_LA[row]) for row in rows]
        prefix = [self.key_value(states[row], ids[row + 1], row) for row in rows]
        out = {}
        for row in rows:
            seen = prefix[: row + 1]
            hidden = self.step(states[row], ids[row + 1], row, seen)
            out[row, 0] = self.logits(hidden)
            for step in range(1, steps):
                if row + 1 + step >= len(ids):
                    break
                state = hidden
                if self.config.norm_output:
                    state = rms(hidden, self.weights["norm.weight"], self.config.rms_norm_eps)
                token, position = ids[row + 1 + step], row + step
                if self.config.method == "peagle":
                    state, token = self.fuse(self.weights["mask_hidden"][0, 0]), self.config.mask_token_id
                seen = [*seen, self.key_value(state, token, position)]
                hidden = self.step(state, token, position, seen)
                out[row, step] = self.logits(hidden)
        return out


def oracle_loss(
    draft: Draft,
    documents: list[tuple[Tensor, list[int], list[int], Tensor]],
    steps: int,
    decay: float,
    denominator: str,
    on_policy: bool = False,
) -> tuple[Tensor, list[dict[str, float]]]:
    """`documents`: (taps, ids, mask, the target's full logits [L, V]). The loss, and per step its counts; `on_policy`:
    a row is followed while what it drafts is the text; denominators stay those of all rows."""
    words = (torch.arange(draft.config.draft_vocab_size) + draft.d2t).tolist()
    sums = [torch.zeros(()) for _ in range(steps)]
    counts = [{"rows": 0, "kept": 0, "hits": 0} for _ in range(steps)]
    divisors = [0] * steps
    for taps, ids, mask, target_logits in documents:
        predicted, lost = Oracle(draft).document(taps, ids, steps), set()
        for (row, step), logits in predicted.items():
            answer = [position < len(ids) and bool(mask[position]) for position in range(row + 1, row + 3 + step)]
            if not all(answer):
                continue
            teacher_logits = target_logits[row + 1 + step]
            best = int(teacher_logits.argmax())
            divisors[step] += best in words
            if row in lost:
                continue
            drafted = words[int(logits.argmax())]
            if on_policy and drafted != ids[row + 2 + step]:
                lost.add(row)
            counts[step]["rows"] += 1
            if best not in words:
                continue
            counts[step]["kept"] += 1
            counts[step]["hits"] += drafted == best
            teacher = teacher_logits[words].softmax(0)
            sums[step] = sums[step] - (teacher * logits.log_softmax(0)).sum()
    total = sum(len(ids) for _, ids, _, _ in documents)
    loss = torch.zeros(())
    for step in range(steps):
        by = total if denominator == "all" else max(divisors[step], 1)
        loss = loss + decay**step * sums[step] / by
    return loss, counts
