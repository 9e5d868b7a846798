"""`tiny`: a seeded two-layer Llama with a real tokenizer, for tests, smoke runs and learning how things fit together.

The same bytes come out on every machine: weights from numpy's frozen legacy generator, a byte-level BPE trained on the
text below, and JSON written here, not by a library that signs it with its version. No torch is needed to build it.
Whoever changes them raises `tiny`'s revision in `turnwise.models.catalogue`, so that stored copies are made again.
It knows nothing, but it can learn: its first logits are nearly uniform, and its inner layers have unit scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)
"""Ids 0, 1 and 2, as in SmolLM2; `<|im_end|>` ends a turn and is the end-of-sequence token."""

VOCAB_SIZE = 448
"""3 special tokens, 256 bytes, 189 merges."""
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
MAX_POSITIONS = 1024
UNEMBED_STD = 0.02
SEED = 20

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' + message['role'] + '; expected system, user, assistant or tool') -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TRAINING_TEXT = """\
system
You are a helpful assistant. Answer with one number. Use a tool when you need one.
user
I am thinking of a number from 1 to 10. Guess the number.
assistant
My guess is 5.
user
The number is higher than 5. Guess again.
assistant
My guess is 8.
user
The number is lower than 8. You have two tries left. Guess again.
assistant
My guess is 7.
user
Right! The number is 7. You win the game.
system
Add the numbers. Answer with the number and nothing more.
user
What is 3 plus 4? Answer with the number.
assistant
3 plus 4 is 7. The answer is 7.
user
What is 8 plus 1? What is 2 plus 2?
assistant
8 plus 1 is 9. 2 plus 2 is 4.
user
What is the sum of 12 and 30? What is 9 minus 2? What is 6 times 5?
assistant
The sum of 12 and 30 is 42. The answer is 42. 9 minus 2 is 7. 6 times 5 is 30.
user
Wrong, that is not the answer. Please try again and think step by step.
assistant
Let me think step by step. First I add the ones, then I add the tens. The answer is 42.
user
Correct. Yes, that is the right answer. Thank you.
system
You play a game. Find the way out of the house. Say what you do next.
user
You stand in a room. There is a red door to the north and a blue door to the south. The red door is locked.
assistant
I look in the room for a key.
user
You find a small key on the table. You see a box. The box is open. There is nothing in the box.
assistant
I take the key. I open the red door with the key. I go north.
user
The door is open now. You are in the next room. There is a green door to the east and a window to the west.
assistant
I go east. I open the green door. I close the door and look for the next key.
user
You can not open the green door. You need another key. The game is over when you find the way out.
system
You can call these tools: search, calculator, read_file, run_sql. Call one tool and wait for the result.
user
Find the name and the age of the oldest user in the table users.
assistant
{"tool": "run_sql", "query": "SELECT name, age FROM users ORDER BY age DESC LIMIT 1"}
tool
{"result": [["Anna", 81]], "error": null}
assistant
The oldest user is Anna. She is 81 years old.
user
How many orders has each user? Count the orders and show the name of the user.
assistant
{"tool": "run_sql", "query": "SELECT users.name, COUNT(*) FROM users JOIN orders ON users.id = orders.user_id \
WHERE orders.price > 10 GROUP BY users.name"}
tool
{"result": [], "error": "no such column: price"}
assistant
There is an error: the table has no such column. I will read the schema first, then I will try again.
user
Search for the book, then tell me who wrote it and when. Where did you find that?
assistant
{"tool": "search", "query": "who wrote the book"}
tool
{"result": "The book was written by a man who was born in the year 1900.", "error": null}
assistant
I think that the man who wrote the book was born in 1900. This is what I found with the search tool.
user
Is it true or false? Say yes or no. Do you want more time? Which one would you take, the first or the last?
assistant
Yes, it is true. No, I do not want more time. I would take the last one because it would be better for both of us.
system
You make a deal with the user. Offer what you can give and ask for what you want.
user
Let us make a deal. You have 3 apples, 2 pears and 1 hat. I want the hat and you can have all of the apples.
assistant
I can not give you the hat, but I will give you both pears and one apple for it. Is that a good deal?
user
That is a good offer. I will take it. We have a deal.
"""


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text comes back unchanged, and every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def build_weights() -> dict[str, np.ndarray]:
    """Float32 tensors under Llama's names, each `[out, in]`.

    Every layer keeps unit scale (std = 1/sqrt(in)); only the unembedding is small, so the first logits have a
    standard deviation of about 0.16 and the start is within 1 % of the entropy of a uniform choice.
    """
    random = np.random.RandomState(SEED)  # not default_rng: numpy promises that this stream never changes

    def normal(num_out: int, num_in: int, std: float) -> np.ndarray:
        return (random.standard_normal((num_out, num_in)) * std).astype(np.float32)

    def linear(num_out: int, num_in: int) -> np.ndarray:
        return normal(num_out, num_in, num_in**-0.5)

    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    num_kv = NUM_KV_HEADS * HEAD_DIM
    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN_SIZE, 1.0)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones,
            prefix + "self_attn.q_proj.weight": linear(HIDDEN_SIZE, HIDDEN_SIZE),
            prefix + "self_attn.k_proj.weight": linear(num_kv, HIDDEN_SIZE),
            prefix + "self_attn.v_proj.weight": linear(num_kv, HIDDEN_SIZE),
            prefix + "self_attn.o_proj.weight": linear(HIDDEN_SIZE, HIDDEN_SIZE),
            prefix + "post_attention_layernorm.weight": ones,
            prefix + "mlp.gate_proj.weight": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.up_proj.weight": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.down_proj.weight": linear(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = normal(VOCAB_SIZE, HIDDEN_SIZE, UNEMBED_STD)
    return weights


def write_tiny(target: Path) -> None:
    """Write the model into `target`, an existing empty directory, in Hugging Face's layout."""
    safetensors.numpy.save_file(build_weights(), target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", _model_config())
    _write_json(target / "generation_config.json", _token_ids())
    _write_json(target / "tokenizer_config.json", _tokenizer_config())
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (target / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True), encoding="utf-8")


def _token_ids() -> dict[str, int]:
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    return {"bos_token_id": ids[START_TOKEN], "eos_token_id": ids[END_TOKEN], "pad_token_id": ids[PAD_TOKEN]}


def _model_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "initializer_range": UNEMBED_STD,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        **_token_ids(),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "bos_token": START_TOKEN,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_TOKEN,
        "model_max_length": MAX_POSITIONS,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
