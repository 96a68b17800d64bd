"""Tiny targets for tests: a Llama of a few layers with a byte-level tokenizer and a ChatML template, in a folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS, HIDDEN = 8, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(seed: int = 0, layers: int = LAYERS, hidden: int = HIDDEN, vocab: int = 259) -> LlamaForCausalLM:
    """Random, but wired so that each layer moves the residual by 10 to 50 % and greedy text does not loop at once."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 1.0)
            elif "lm_head" in name:
                parameter.normal_(0.0, 3.0 / hidden**0.5)
            else:  # sized so that attention and MLP together add about a third of the residual's norm
                parameter.normal_(0.0, 0.8 / parameter.shape[1] ** 0.5)
    return model


def save_tiny_target(folder: Path, seed: int = 0, **shape: int) -> Path:
    """Write an ordinary Hugging Face folder (config, safetensors, tokenizer, generation config); return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(seed, **shape).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
