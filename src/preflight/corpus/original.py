#!/usr/bin/env python3
"""Asks the original's preflight for its verdict on every case of the corpus.

    original.py --original CHECKOUT --cases CASES.jsonl > original.txt

CHECKOUT is a checkout of LegoX/Lego-RL; its scripts run as they are, in a copy. Training cases go through
the functions of its train.sh up to the preflight (structure-only, or in full where files were looked at),
without what only prints; evaluation and sampling cases source its preflight with the variables that its
train runner would pass, since its other runners never call it. A program stands in for the Python in which
the runner looks for verl's routing replay. One line a case: number, exit code, rules that refuse, rules
that warn, under the names of our rules.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# A word of the original's line -> our rule. The first that matches counts.
RULES = [
    (r"Pick one|no image source|^image:", "image-source"),
    (r"K8S_KUBECONFIG file", "kubeconfig"),
    (r"NYDUS_MIRROR", "image-mirror"),
    (r"ROLLOUT_IS=", "importance-weights"),
    (r"LR_SCHEDULER|lr_scheduler", "lr-schedule"),
    (r"VAL_AGENT_MAX_TIMEOUT|val-specific", "val-timeout"),
    (r"backend=docker currently", "docker-scaffold"),
    (r"AGENT_NAME|unknown SCAFFOLD", "agent-name"),
    (r"ENABLE_R3|R3 ", "routing-replay"),
    (r"veomni requires", "veomni"),
    (r"VRAM|backward OOM", "memory"),
    (r"topology|SP_SIZE", "topology"),
    (r"path does not exist|unset$", "paths"),
    (r"TOOL_PARSER|tool_parser|30B \+|not in known rules", "tool-parser"),
]

MODULES = ["runtime/process.env", "backend/${BACKEND}.env", "harbor/common.env", "scaffold/${SCAFFOLD}.env"]
TRAIN = MODULES + ["verl/common.env", "verl/${TRAINING_MODE}.env", "verl/${MODEL_ENGINE}.env"]

QWEN35 = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
CONFIGS = {
    "dense": {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36},
    "moe": {"model_type": "qwen3_5_moe", "text_config": {**QWEN35, "num_experts": 256, "num_experts_per_tok": 8}},
    "moe30b": {"model_type": "qwen3_moe", "num_experts": 128},
    "dense35": {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
}


def rule_of(line):
    for pattern, rule in RULES:
        if re.search(pattern, line):
            return rule
    sys.exit(f"original.py: no rule is known for the line `{line}`")


def judge(root, number, case):
    place = root / str(number)
    place.mkdir()
    model = place / "m" / case["model"]
    if case["checkpoint"] != "absent":
        model.mkdir(parents=True)
    if case["checkpoint"] in CONFIGS:
        (model / "config.json").write_text(json.dumps(CONFIGS[case["checkpoint"]]))
    if case["checkpoint"] == "broken":
        (model / "config.json").write_text('{"model_type": "qw')
    values = dict(case["values"], MODEL_PATH=str(model))
    for name in ("TRAIN_FILES", "VAL_FILES", "K8S_KUBECONFIG"):
        path = place / name
        if name not in case["missing"]:
            path.write_text("x")
        values[name] = str(path)
    structure = "1" if case["checkpoint"] == "unread" else "0"
    lines = [f"{name}='{value}'" for name, value in values.items()]
    lines += ["VENV_PATH=/nonexistent", f"HARBOR_LOG_DIR={place}/logs"]
    config = place / "run.env"
    if case["kind"] == "train":
        config.write_text("\n".join(lines + ["TEMPLATE_MODULES=(" + " ".join(f'"{m}"' for m in TRAIN) + ")"]) + "\n")
        command = ["bash", "-c", 'set -euo pipefail; REPO_ROOT=$2 TEMPLATE_ROOT=$2/scripts/templates CONFIG_PATH=$1; '
                   'source "$2/scripts/train/lib/runtime.sh"; source_config_and_templates; validate_runtime_config; '
                   'PYTHON_BIN=$3; run_preflight', "bash", str(config), str(root / "original"), str(root / "python")]
    else:
        config.write_text("\n".join(lines) + "\n")
        command = ["bash", "-c", 'set -a; source "$1"; source "$2/lib/model_traits.sh"; '
                   'export TOOL_PARSER="$TOOL_CALL_PARSER" AGENT_NAME="${HARBOR_AGENT_NAME:-}" ENGINE= '
                   'NNODES= N_NODES_TRAIN= SP_SIZE= ENABLE_R3=False '
                   'IMAGE_REGISTRY="${HARBOR_OPENSWE_IMAGE_REGISTRY:-}" INLINE_BUILD="${HARBOR_K8S_INLINE_BUILD:-}" '
                   'NYDUS_MIRROR="${HARBOR_NYDUS_MIRROR:-}"; source "$2/lib/preflight.sh"',
                   "bash", str(config), str(root / "original/scripts")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(place), "PF_STRUCTURE_ONLY": structure,
                   "PF_KIND": case["kind"], "LC_ALL": "C.UTF-8", "PREFLIGHT_EMBEDDED": "1"}
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=120)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + "\n" + done.stderr)
    if "preflight config check" not in text:
        sys.exit(f"original.py: case {number} was not checked:\n{text[-2000:]}")
    found = {"FATAL": set(), "WARN": set()}
    for verdict, line in re.findall(r"^ *. (FATAL|WARN) +(.*)$", text, re.M):
        found[verdict].add(rule_of(line))
    shutil.rmtree(place)
    names = lambda verdict: ",".join(sorted(found[verdict])) or "-"
    return f"{number} {done.returncode} {names('FATAL')} {names('WARN')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", required=True, type=pathlib.Path)
    parser.add_argument("--cases", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.cases.read_text().splitlines() if line]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        shutil.copytree(arguments.original / "scripts", root / "original/scripts")
        replay = root / "verl/utils/veomni/router_replay.py"
        replay.parent.mkdir(parents=True)
        replay.write_text("")
        python = root / "python"
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {root}/verl/__init__.py && exit\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        print("# number, exit code, rules that refuse, rules that warn: made by original.py")
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() * 2) as pool:
            for line in pool.map(lambda job: judge(root, *job), enumerate(cases)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
