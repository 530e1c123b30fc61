#!/usr/bin/env python3
"""The independent side of two tests: transformers and PyTorch do what our trainer does.

    transformers_reference.py logits f32|f64 FOLDER IDS OUT.safetensors
    transformers_reference.py train  f32|f64 FOLDER DATA.json OUT.json

Arithmetic is f32, or f64 without exception: transformers itself turns norms, softmaxes, rotary angles and the delta
rule into f32, so that here the name means f64. Parameters, gradients and moments of `train` are the same.

`logits` loads FOLDER strictly (nothing missing, nothing unexpected but draft layers) and writes the logits of one
text, a comma-separated list of token ids, in the element type of the arithmetic.

`train` makes DATA's number of optimizer steps on its fixed trials, one unpacked sequence at a time, and writes loss,
entropy and gradient norm of every step. All formulas are written down here from their papers: group-relative
advantages, the clipped surrogate with dual clip against the log-probabilities in the data, the k3 estimator of the
divergence from the starting weights, the entropy bonus, the mean over trials of the mean over tokens; AdamW is
PyTorch's.
"""
import copy
import json
import math
import sys

import torch
import transformers

torch.set_num_threads(1)


def load(folder, dtype):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, info = kind.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    unexpected = [key for key in info["unexpected_keys"] if not key.startswith("mtp.")]
    assert not (unexpected or info["missing_keys"] or info["mismatched_keys"]), info
    if dtype == "f64":
        compute_in_double(model)
    return model


def compute_in_double(model):
    """From here on what transformers calls f32 is f64. Only for a model that is loaded."""
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    model.double()
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            # Frequencies again, which were rounded.
            module.__init__(module.config)


def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def logits(dtype, folder, ids, out):
    from safetensors.torch import save_file

    with torch.no_grad():
        result = logits_of(load(folder, dtype), [int(i) for i in ids.split(",")])
    save_file({"logits": result.contiguous()}, out)


def sampled_values(model, sequence):
    """Log-probabilities and entropies of the sampled tokens."""
    places = torch.tensor(sequence["sampled"])
    rows = logits_of(model, sequence["ids"])[places - 1].log_softmax(-1)
    targets = torch.tensor(sequence["ids"])[places]
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def advantages(group):
    rewards = [trial["reward"] for trial in group]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def surrogate(ratio, advantage, low, high, dual):
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.minimum(loss, torch.full_like(loss, -advantage * dual)) if advantage < 0 else loss


def train(dtype, folder, data, out):
    with open(data) as file:
        data = json.load(file)
    settings = data["settings"]
    model = load(folder, dtype).train()
    reference = copy.deepcopy(model).eval()
    parameters = [p for name, p in model.named_parameters() if "visual" not in name]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings["lr"], betas=(0.9, 0.999), eps=1e-8,
    )
    members, total = [], 0.0
    for group in data["groups"]:
        for trial, advantage in zip(group, advantages(group)):
            for sequence in trial["sequences"]:
                with torch.no_grad():
                    kept, _ = sampled_values(reference, sequence)
                members.append((sequence, advantage, kept))
                total += sequence["weight"]
    curves = {"loss": [], "entropy": [], "grad_norm": []}
    for _ in range(settings["steps"]):
        optimizer.zero_grad(set_to_none=True)
        loss_sum = entropy_sum = 0.0
        for sequence, advantage, kept in members:
            share = sequence["weight"] / total
            logprobs, entropies = sampled_values(model, sequence)
            ratio = (logprobs - torch.tensor(sequence["rollout_logprobs"])).exp()
            token = surrogate(ratio, advantage, settings["low"], settings["high"], settings["dual"])
            distance = kept - logprobs
            token = token + settings["kl"] * (distance.exp() - distance - 1)
            token = token - settings["entropy"] * entropies
            loss = share * token.mean()
            loss.backward()
            loss_sum += loss.item()
            entropy_sum += share * entropies.mean().item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        for key, value in (("loss", loss_sum), ("entropy", entropy_sum), ("grad_norm", norm.item())):
            curves[key].append(value)
    with open(out, "w") as file:
        json.dump(curves, file)


if __name__ == "__main__":
    {"logits": logits, "train": train}[sys.argv[1]](*sys.argv[2:])
