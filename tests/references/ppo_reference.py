#!/usr/bin/env python3
"""The independent side of the test of PPO with a critic: PyTorch and transformers do what our trainer does.

    ppo_reference.py FOLDER DATA.json OUT.json

FOLDER is the starting policy. The critic is transformers' token classifier with one label on the same weights, its
head and bias zero. Every step, on DATA's fixed trials:

1. log-probabilities under the policy and under the starting policy, and the critic's predictions, before any update;
2. rewards by token: minus the penalty for leaving the starting policy, plus the trial's reward at the last token;
   advantages as the sum of discounted one-step differences written out term by term, targets, whitening;
3. the critic, then the policy, once per epoch and mini-batch: clipped value loss; clipped surrogate with dual clip
   against the log-probabilities in DATA; the mean over tokens; cut to a global norm; AdamW of PyTorch.

Everything is written from the papers (Schulman et al. 2016, 2017; Ye et al. 2020; Ziegler et al. 2019), one unpacked
sequence at a time. What each step reports goes to OUT, one list a figure.
"""
import copy
import json
import sys

import torch
import transformers

torch.set_num_threads(1)


def load(kind, folder, dtype, **more):
    loader = getattr(transformers, kind)
    return loader.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **more).eval()


def adamw(model, lr, settings):
    decays = [p for p in model.parameters() if p.dim() >= 2]
    stays = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": settings["weight_decay"]}, {"params": stays, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)


def logprobs(model, sequence):
    ids = torch.tensor(sequence["ids"])
    rows = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    return torch.stack([rows[t - 1, ids[t]] for t in sequence["sampled"]])


def values(critic, sequence):
    rows = critic(torch.tensor(sequence["ids"])[None], use_cache=False).logits[0, :, 0]
    return torch.stack([rows[t - 1] for t in sequence["sampled"]])


def advantages(rewards, predictions, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k}, each sum from its definition."""
    n = len(rewards)
    after = predictions[1:] + [0.0]
    delta = [rewards[t] + gamma * after[t] - predictions[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def whitened(members):
    """Advantages of all members, by the mean and the unbiased variance over tokens of a sequence's share."""
    pairs = [(m["weight"], a) for m in members for a in m["advantages"]]
    count = sum(w for w, _ in pairs)
    mean = sum(w * a for w, a in pairs) / count
    variance = sum(w * (a - mean) ** 2 for w, a in pairs) / (count - 1)
    for m in members:
        m["advantages"] = [(a - mean) / (variance + 1e-8) ** 0.5 for a in m["advantages"]]


def update(model, optimizer, losses, members, norm):
    """One update by Σ_s w_s Σ_t l / Σ_s w_s n_s; the loss and the norm of the gradient before the cut."""
    count = sum(m["weight"] * len(m["sampled"]) for m in members)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for m in members:
        loss = m["weight"] * losses(m).sum() / count
        loss.backward()
        total += loss.item()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), norm).item()
    optimizer.step()
    return total, found


def main(folder, data, out):
    with open(data) as file:
        data = json.load(file)
    settings = data["settings"]
    dtype = getattr(torch, settings["dtype"])
    policy = load("AutoModelForCausalLM", folder, dtype)
    reference = copy.deepcopy(policy)
    critic = load("AutoModelForTokenClassification", folder, dtype, num_labels=1)
    with torch.no_grad():
        critic.score.weight.zero_()
        critic.score.bias.zero_()
    policy_optimizer = adamw(policy, settings["lr"], settings)
    critic_optimizer = adamw(critic, settings["critic_lr"], settings)
    groups = [
        [dict(s, reward=trial["reward"]) for trial in group for s in trial["sequences"]] for group in data["groups"]
    ]
    everyone = [m for group in groups for m in group]
    size = settings["mini_batch_groups"]
    mini_batches = [sum(groups[i : i + size], []) for i in range(0, len(groups), size)]
    curves = {}

    def value_loss(m):
        new, old = values(critic, m), torch.tensor(m["values"], dtype=dtype)
        target, bound = torch.tensor(m["returns"], dtype=dtype), settings["value_clip"]
        held = old + (new - old).clamp(-bound, bound)
        worse = (held - target).square() > (new - target).square()
        m["value_clipped"] = worse.sum().item()
        return torch.where(worse, (held - target).square(), (new - target).square()) / 2

    def policy_loss(m):
        new, old = logprobs(policy, m), torch.tensor(m["rollout_logprobs"], dtype=dtype)
        advantage = torch.tensor(m["advantages"], dtype=dtype)
        ratio = (new - old).exp()
        plain = advantage * ratio
        cut = advantage * ratio.clamp(1 - settings["low"], 1 + settings["high"])
        m["clipped"] = (cut < plain).sum().item()
        gain = torch.minimum(plain, cut)
        return -torch.where(advantage < 0, torch.maximum(gain, advantage * settings["dual"]), gain)

    for _ in range(settings["steps"]):
        with torch.no_grad():
            for m in everyone:
                now, kept = logprobs(policy, m).tolist(), logprobs(reference, m).tolist()
                m["values"] = values(critic, m).tolist()
                m["kl"] = [a - b for a, b in zip(now, kept)]
        for m in everyone:
            rewards = [-settings["kl"] * d for d in m["kl"]]
            rewards[-1] += m["reward"]
            m["advantages"] = advantages(rewards, m["values"], settings["gamma"], settings["lambda"])
            m["returns"] = [a + v for a, v in zip(m["advantages"], m["values"])]
        whitened(everyone)

        def figure(key, value):
            curves.setdefault(key, []).append(value)

        def flat(key):
            return torch.tensor([x for m in everyone for x in m[key]], dtype=torch.float64)

        figure("critic/values/mean", flat("values").mean().item())
        figure("critic/returns/mean", flat("returns").mean().item())
        figure("critic/advantages/max", flat("advantages").max().item())
        figure("critic/vf_explained_var", (1 - (flat("returns") - flat("values")).var() / flat("returns").var()).item())
        weights = sum(m["weight"] for m in everyone)
        divergence = sum(m["weight"] * sum(m["kl"]) / len(m["kl"]) for m in everyone) / weights
        figure("actor/reward_kl_penalty", divergence)
        for keys, model, optimizer, losses, clipped in [
            (("critic/vf_loss", "critic/grad_norm", "critic/vf_clipfrac"), critic, critic_optimizer, value_loss, "value_clipped"),
            (("actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac"), policy, policy_optimizer, policy_loss, "clipped"),
        ]:
            made = []
            for _ in range(settings["epochs"]):
                for members in mini_batches:
                    loss, norm = update(model, optimizer, losses, members, settings["max_grad_norm"])
                    tokens = sum(len(m["sampled"]) for m in members)
                    made.append((loss, norm, sum(m[clipped] for m in members) / tokens))
            for key, column in zip(keys, zip(*made)):
                figure(key, sum(column) / len(column))
    with open(out, "w") as file:
        json.dump(curves, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
