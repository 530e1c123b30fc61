#!/usr/bin/env python3
"""Does a GPU compute what the CPU computes? A table over model folders, by `legorl-rank model run`.

    bench/gpu/agree.py [--rank target/release/legorl-rank] [--greedy 64] FOLDER=IDS.safetensors ...

IDS holds `input_ids`. Where it also holds `logits` and `greedy` of another implementation, the last
columns compare the CPU with them. Needs Python with torch and safetensors.

logits: largest difference over the standard deviation; logprob: largest difference in nats; rms: root mean
square of the difference of logits over their standard deviation; experts: share of tokens whose set of experts is
the same; greedy: decoded ids that are the same.
Fails when f32 differs by more than 1e-4 (1e-6 with a delta net, which is computed in f64), in experts or in greedy
ids; or when bf16 on the GPU is more than half as far again from f32 as bf16 on the CPU is.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from safetensors.torch import load_file


def run(rank, folder, ids, out, device, dtype, greedy):
    command = [rank, "model", "run", folder, "--ids", ids, "--output", out, "--device", device,
               "--dtype", dtype, "--greedy", str(greedy)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"agree: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return load_file(out)


def compare(want, got):
    deviation = want["logits"].std()
    row = {
        "logits": ((want["logits"] - got["logits"]).abs().max() / deviation).item(),
        "rms": ((want["logits"] - got["logits"]).square().mean().sqrt() / deviation).item(),
        "logprob": (want["logprobs"] - got["logprobs"]).abs().max().item(),
        "experts": None,
        "greedy": None,
    }
    if "topk" in want and "topk" in got:
        same = want["topk"].sort(-1).values == got["topk"].reshape(want["topk"].shape).sort(-1).values
        row["experts"] = same.all(-1).float().mean().item()
    if "greedy" in want and "greedy" in got:
        length = min(want["greedy"].shape[1], got["greedy"].shape[1])
        same = want["greedy"][:, 8:length] == got["greedy"][:, 8:length]
        row["greedy"] = (int(same.sum()), same.numel())
    return row


def shares(row):
    experts = "-" if row["experts"] is None else f"{row['experts']:.4f}"
    greedy = "-" if row["greedy"] is None else "%d/%d" % row["greedy"]
    return f"{experts:>7} {greedy:>8}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", default="target/release/legorl-rank")
    parser.add_argument("--greedy", type=int, default=64)
    parser.add_argument("models", nargs="+", metavar="FOLDER=IDS")
    args = parser.parse_args()
    wide_head = f"{'logits':>8} {'logprob':>8} {'experts':>7} {'greedy':>8}"
    narrow_head = f"{'rms':>6} {'(CPU)':>6} {'experts':>7} {'greedy':>8}"
    print(f"{'':20} | {'CUDA f32, CPU f32':^34} | {'CUDA bf16, CPU f32':^30} | {'CPU f32, reference':^34}")
    print(f"{'folder':20} | {wide_head} | {narrow_head} | {wide_head}")
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "out.safetensors"
        for model in args.models:
            folder, ids = model.split("=")
            name = pathlib.Path(folder).name
            kind = json.loads((pathlib.Path(folder) / "config.json").read_text())["model_type"]
            bound = 1e-6 if kind.startswith(("qwen3_next", "qwen3_5")) else 1e-4
            cpu = run(args.rank, folder, ids, out, "cpu", "f32", args.greedy)
            wide = compare(cpu, run(args.rank, folder, ids, out, "cuda", "f32", args.greedy))
            narrow = compare(cpu, run(args.rank, folder, ids, out, "cuda", "bf16", args.greedy))
            on_cpu = compare(cpu, run(args.rank, folder, ids, out, "cpu", "bf16", 0))
            given = load_file(ids)
            line = f"{name:20} | {wide['logits']:8.1e} {wide['logprob']:8.1e} {shares(wide)} | "
            line += f"{narrow['rms']:6.3f} {on_cpu['rms']:6.3f} {shares(narrow)} |"
            if "logits" in given:
                row = compare(given, cpu)
                line += f" {row['logits']:8.1e} {row['logprob']:8.1e} {shares(row)}"
            print(line, flush=True)
            same, count = wide["greedy"]
            if wide["logits"] > bound or wide["experts"] not in (None, 1.0) or same != count:
                wrong.append(f"{name}: f32")
            if narrow["rms"] > 1.5 * on_cpu["rms"] + 0.01:
                wrong.append(f"{name}: bf16")
    if wrong:
        sys.exit("agree: outside the bounds: " + ", ".join(wrong))
    print("agree: all within the bounds")


main()
