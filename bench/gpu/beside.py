#!/usr/bin/env python3
"""Qwen3 shapes with random weights, and what transformers does with them.

    bench/gpu/beside.py make 0.6B|4B FOLDER        a model folder in bf16
    bench/gpu/beside.py train FOLDER               16,384 tokens a step in micro-batches of 4,096
    bench/gpu/beside.py decode FOLDER [BATCH ...]  greedy behind 1,024 tokens, static cache

Training: SDPA, gradient checkpointing, bf16 weights and moments, fused AdamW, clipping. Decoding: eager.
"""
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPES = {  # hidden, MLP, layers, query heads, key heads
    "0.6B": (1024, 3072, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
}


def make(shape, folder):
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    config = Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=inner,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                         head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
                         rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()


def train(folder, micro=4096, count=4):
    model = load(folder)
    model.train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (count, micro), device="cuda")
    times = []
    for step in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for row in ids:
            (model(input_ids=row[None], labels=row[None]).loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    print(f"transformers train {folder}: {micro * count / seconds:.0f} tokens/s, {seconds:.3f} s a step, "
          f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True)


@torch.no_grad()
def decode(folder, batches, context=1024, tokens=48):
    model = load(folder).eval()
    model.generation_config.eos_token_id = None
    for batch in batches:
        ids = torch.randint(0, model.config.vocab_size, (batch, context), device="cuda")
        options = dict(attention_mask=torch.ones_like(ids), do_sample=False, cache_implementation="static",
                       disable_compile=True, pad_token_id=0)
        seconds = {}
        for length in (4, 4, tokens):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=length, min_new_tokens=length, **options)
            torch.cuda.synchronize()
            seconds[length] = time.perf_counter() - begin
        step = (seconds[tokens] - seconds[4]) / (tokens - 4)
        print(f"transformers decode {folder} batch {batch}, context {context}: {batch / step:.0f} tokens/s, "
              f"{1e3 * step:.2f} ms a step", flush=True)


match sys.argv[1:]:
    case ["make", shape, folder]:
        make(shape, folder)
    case ["train", folder]:
        train(folder)
    case ["decode", folder, *batches]:
        decode(folder, [int(b) for b in batches] or [1, 8, 32, 128])
    case _:
        sys.exit(__doc__)
