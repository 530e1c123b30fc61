#!/usr/bin/env python3
"""Random tiny checkpoints of every family, computed by transformers and by `legorl-rank model run`.

    families.py PROGRAM CASES [--seed N] [--family NAME] [--keep FOLDER] [--case K]

Each case draws a family, a shape, an initialisation, a way to store it and the tokens; transformers loads the folder
strictly and is the reference. Compared are logits, log-probabilities, hidden states by layer, routing and 64 tokens of
greedy decoding, each as the largest difference over the reference's standard deviation; then the folder that
`model export` wrote must hold the same files and load strictly with the same logits.

Bounds: 1e-4 of the standard deviation, for families with a delta net 2e-4. Large random weights multiply what either
side rounded; so a case that leaves the bound is judged by the same network with transformers' f32 parts in f64. Families
with a delta net must meet that within the bound; the others, which we compute in f32 too, within twice the distance of
transformers' own f32.

A routing or a greedy token that differs is a difference only where the reference prefers its own by more than the
bound. Prints the worst gaps by family; the exit status is 1 when a case fails.
"""
import argparse
import collections
import contextlib
import json
import math
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FAMILIES = {
    "llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
}
HYBRID = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
SPARSE = {"qwen3_moe", "qwen3_next", "qwen3_5_moe"}
NESTING = {"qwen3_5", "qwen3_5_moe"}
GREEDY, PROMPT = 64, 8
FULL = "full_attention"


class Failure(Exception):
    """What is wrong with a case."""


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw_rope(r, family):
    rope = dict(rope_type="default", rope_theta=r.choice([1e4, 1e6, 5e5, 1e7, 123.5]))
    if family in HYBRID:
        rope["partial_rotary_factor"] = r.choice([0.25, 0.5, 1.0])
    kind = r.choice(["default"] * 4 + ["llama3", "linear", "yarn", "yarn"])
    if kind == "llama3":
        rope |= dict(rope_type=kind, factor=r.choice([2.0, 8.0]), low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=r.choice([32, 64, 128]))
    if kind == "linear":
        rope |= dict(rope_type=kind, factor=r.choice([2.0, 3.5, 4]))
    if kind == "yarn":
        rope |= dict(rope_type=kind, factor=r.choice([2.0, 4.0, 1.5]),
                     original_max_position_embeddings=r.choice([32, 64, 128, 4096]))
        optional = [dict(beta_fast=r.choice([16, 8.0])), dict(beta_slow=r.choice([2, 0.5])), dict(truncate=False),
                    dict(attention_factor=r.choice([1.0, 0.8, 1.3])), dict(mscale=0.7, mscale_all_dim=1.2),
                    dict(mscale=1.0, mscale_all_dim=1.0), dict(mscale=0.7)]
        for extra in r.sample(optional, r.choice([0, 0, 1, 2, 3])):
            rope |= extra
    return rope


def draw_text(r, family):
    """The text model's keys."""
    heads = r.choice([1, 2, 3, 4, 6, 8])
    layers = r.choice([1, 2, 3, 4, 5])
    partial_fits = [8, 16, 24, 32] if family in HYBRID else [2, 6, 8, 10, 16, 20, 32]
    text = dict(
        vocab_size=r.choice([131, 64, 200, 512]),
        hidden_size=r.choice([24, 40, 48, 64, 72]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=r.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=r.choice(partial_fits),
        max_position_embeddings=r.choice([400, 512, 4096]),
        rms_norm_eps=r.choice([1e-5, 1e-6, 1e-3]),
        attention_bias=r.random() < 0.25,
        intermediate_size=r.choice([72, 40, 128, 17]),
        rope_parameters=draw_rope(r, family),
    )
    if family == "llama":
        text["hidden_size"] = heads * r.choice([8, 10, 14, 24])
        text["mlp_bias"] = r.random() < 0.3
    if family in SPARSE:
        experts = r.choice([2, 4, 5, 8, 16])
        text |= dict(num_experts=experts, moe_intermediate_size=r.choice([8, 12, 33]),
                     num_experts_per_tok=r.choice([1, min(2, experts), min(3, experts), experts]))
    if family in ("qwen3_moe", "qwen3_next"):
        text["norm_topk_prob"] = r.random() < 0.5
        if r.random() < 0.4:
            text["decoder_sparse_step"] = r.choice([2, 3])
        if r.random() < 0.4:
            text["mlp_only_layers"] = r.sample(range(layers), r.randint(0, layers))
    if family in HYBRID:
        key_heads = r.choice([1, 2, 3])
        text |= dict(linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * r.choice([1, 2, 3, 4]),
                     linear_key_head_dim=r.choice([4, 8, 12, 16]), linear_value_head_dim=r.choice([4, 8, 10, 16]),
                     linear_conv_kernel_dim=r.choice([2, 3, 4, 5]))
        if r.random() < 0.5:
            text["full_attention_interval"] = r.choice([2, 3, 4])
        else:
            text["layer_types"] = [r.choice([FULL, "linear_attention"]) for _ in range(layers)]
    if family in HYBRID & SPARSE:
        text["shared_expert_intermediate_size"] = r.choice([8, 20, 31])
    return text


def draw(seed):
    r = random.Random(seed)
    family = r.choice(list(FAMILIES))
    return dict(
        seed=seed, family=family, text=draw_text(r, family), tied=r.random() < 0.4,
        nested=family in NESTING and r.random() < 0.6,
        stored=r.choice(["float32", "float32", "bfloat16", "float16"]), scale=r.choice([0.3, 1.0, 1.0, 2.0]),
        shards=r.choice([None, None, "30KB"]), stacked=family in SPARSE and r.random() < 0.5,
        draft_layers=family in HYBRID and r.random() < 0.4, old_keys=r.random() < 0.4,
        old_dtype=r.random() < 0.5, rows=r.choice([1, 1, 2, 3]),
        tokens=r.choice([1, 2, 9, 63, 64, 65, 128, 300]),
    )


# ---- making a folder -----------------------------------------------------------------------------------------------


def build(case):
    family, text, t = case["family"], dict(case["text"]), transformers
    text["rope_parameters"] = dict(text["rope_parameters"])
    name = FAMILIES[family]
    if case["nested"]:
        vocabulary = text["vocab_size"]
        vision = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, num_position_embeddings=16,
                      out_hidden_size=text["hidden_size"], patch_size=4)
        ids = dict(image_token_id=vocabulary - 1, video_token_id=vocabulary - 2,
                   vision_start_token_id=vocabulary - 3, vision_end_token_id=vocabulary - 4)
        config = getattr(t, f"{name}Config")(
            text_config=text, vision_config=vision, tie_word_embeddings=case["tied"], **ids)
        return getattr(t, f"{name}ForConditionalGeneration")(config)
    kind = f"{name}TextConfig" if family in NESTING else f"{name}Config"
    return getattr(t, f"{name}ForCausalLM")(getattr(t, kind)(**text, tie_word_embeddings=case["tied"]))


@torch.no_grad()
def randomise(model, case):
    generator = torch.Generator().manual_seed(case["seed"])
    scale = case["scale"]
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_((0.05 + 15 * torch.rand(parameter.shape, generator=generator)).log())
        elif parameter.ndim == 1:
            parameter.add_(0.2 * noise)
        elif name.endswith("conv1d.weight"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)


def tensors_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def stack_experts(tensors):
    stacks, rest = collections.defaultdict(dict), {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts\.)(\d+)\.(\w+)\.weight", name)
        if found:
            stacks[found[1]][int(found[2]), found[3]] = tensor
        else:
            rest[name] = tensor
    for prefix, parts in stacks.items():
        experts = range(len(parts) // 3)
        rows = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in experts]
        rest[prefix + "gate_up_proj"] = torch.stack(rows)
        rest[prefix + "down_proj"] = torch.stack([parts[e, "down_proj"] for e in experts])
    return rest


def split_experts(tensors):
    """Every expert a tensor of its own."""
    rest = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and tensor.ndim == 3:
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                rest[f"{prefix}.{e}.gate_proj.weight"], rest[f"{prefix}.{e}.up_proj.weight"] = gate, up
        elif kind == "down_proj" and tensor.ndim == 3:
            rest |= {f"{prefix}.{e}.down_proj.weight": one for e, one in enumerate(tensor)}
        else:
            rest[name] = tensor
    return rest


def write_tensors(folder, tensors, shards):
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    if shards is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    count = min(3, len(names))
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = dict(metadata={"total_size": 0}, weight_map=weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewrite_config(folder, case):
    """Keys as older programs write them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    if case["old_keys"]:
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        text["rope_scaling"] = None if kind == "default" else dict(type=kind, **rope)
    for keys in (config, text):
        if case["old_dtype"] and "dtype" in keys:
            keys["torch_dtype"] = keys.pop("dtype")
    path.write_text(json.dumps(config))


def make(case, folder):
    torch.manual_seed(0)
    model = build(case).float().eval()
    randomise(model, case)
    model.to(getattr(torch, case["stored"])).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = tensors_of(folder)
    if case["family"] in SPARSE:
        tensors = stack_experts(tensors) if case["stacked"] else split_experts(tensors)
    if case["draft_layers"]:
        tensors["mtp.fc.weight"] = torch.randn(8, 16).bfloat16()
        tensors["mtp.norm.weight"] = torch.randn(8).half()
    write_tensors(folder, tensors, case["shards"])
    rewrite_config(folder, case)


# ---- the reference -------------------------------------------------------------------------------------------------


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32,
                                       attn_implementation="eager", experts_implementation="eager")
    unexpected = [key for key in info["unexpected_keys"] if not key.startswith("mtp.")]
    if unexpected or info["missing_keys"] or info["mismatched_keys"]:
        raise Failure(f"transformers does not load it strictly: {info}")
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.no_grad()
def compute(model, ids, greedy=True):
    routing = []
    hooks = [module.register_forward_hook(lambda _module, _inputs, out: routing.append(out))
             for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    result = dict(
        logits=out.logits, hidden=torch.cat(out.hidden_states),
        logprobs=out.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1),
    )
    if routing:
        result["topk"] = torch.stack([indices for _, _, indices in routing])
        result["topk_w"] = torch.stack([weights for _, weights, _ in routing])
        result["probabilities"] = torch.stack([probabilities.float().softmax(-1) for probabilities, _, _ in routing])
    if greedy:
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or [FULL]
        # transformers' cache needs a layer that attends.
        result["greedy"] = model.generate(input_ids=ids[:, :PROMPT], max_new_tokens=GREEDY, do_sample=False,
                                          attention_mask=torch.ones_like(ids[:, :PROMPT]), use_cache=FULL in kinds)
    return result


class Wide:
    """The module `torch` in which f32 is f64."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(model, wide_angles):
    """transformers with its f32 parts in f64, on request also the rotary frequencies."""
    modules = [sys.modules[type(model).__module__], transformers.modeling_rope_utils]
    narrow, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    for module in modules:
        module.torch = Wide()
    try:
        model.double()
        for part in model.modules():
            if wide_angles and hasattr(part, "compute_default_rope_parameters"):
                kinds = dict(transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS,
                             default=part.compute_default_rope_parameters)
                part.inv_freq = kinds[part.rope_type](part.config)[0]
        yield
    finally:
        torch.Tensor.float = narrow
        for module in modules:
            module.torch = torch


# ---- comparing -----------------------------------------------------------------------------------------------------


def gap(ours, theirs):
    if ours.shape != theirs.shape:
        raise Failure(f"shape {list(ours.shape)} for {list(theirs.shape)}")
    if ours.numel() == 0:
        return 0.0
    if not torch.isfinite(ours).all():
        raise Failure("numbers that are not finite")
    spread = theirs.double().std() if theirs.numel() > 1 else theirs.double().abs()
    return ((ours.double() - theirs.double()).abs().max() / spread.clamp_min(1e-30)).item()


def hidden_gap(ours, theirs, rows):
    """Each layer over its own spread."""
    if ours.shape != theirs.shape:
        raise Failure(f"hidden: shape {list(ours.shape)} for {list(theirs.shape)}")
    return max(gap(a, b) for a, b in zip(ours.split(rows), theirs.split(rows)))


def routing_gap(ours, reference):
    """Weights of the experts; sets that differ must be a near tie of the reference."""
    sets = ours["topk"].sort(-1)[0] == reference["topk"].sort(-1)[0]
    probabilities = reference["probabilities"].double()
    worst = 0.0
    for layer, token in (~sets.all(-1)).nonzero().tolist():
        row = probabilities[layer, token]
        mine, theirs = (set(x["topk"][layer, token].tolist()) for x in (ours, reference))
        worst = max(worst, max(row[list(theirs - mine)]).item() - min(row[list(mine - theirs)]).item())
    both = torch.gather(torch.zeros_like(probabilities).scatter(-1, ours["topk"], ours["topk_w"].double()), -1,
                        reference["topk"])
    equal = sets.all(-1)
    return max(worst, (both - reference["topk_w"].double())[equal].abs().max().item() if equal.any() else 0.0)


@torch.no_grad()
def greedy_gap(ours, reference, model):
    """How much the reference prefers its own token where the first difference of a row is."""
    worst = 0.0
    if ours.shape != reference.shape:
        raise Failure(f"greedy: shape {list(ours.shape)} for {list(reference.shape)}")
    for mine, theirs in zip(ours, reference):
        different = (mine != theirs).nonzero()
        if len(different):
            at = different[0].item()
            row = model(input_ids=theirs[None, :at], use_cache=False).logits[0, -1].double()
            worst = max(worst, ((row[theirs[at]] - row[mine[at]]) / row.std()).abs().item())
    return worst


def compare(ours, reference, model, rows):
    gaps = {name: gap(ours[name], reference[name]) for name in ("logits", "logprobs")}
    gaps["hidden"] = hidden_gap(ours["hidden"], reference["hidden"], rows)
    if ("topk" in reference) != ("topk" in ours):
        raise Failure("routing of one side alone")
    if "topk" in reference:
        gaps["routing"] = routing_gap(ours, reference)
    if "greedy" in reference:
        gaps["greedy"] = greedy_gap(ours["greedy"], reference["greedy"], model)
    return gaps


def call(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failure(f"`{' '.join(map(str, command))}` ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def same_files(a, b):
    names = sorted(p.name for p in a.iterdir())
    if names != sorted(p.name for p in b.iterdir()):
        raise Failure(f"exported files {sorted(p.name for p in b.iterdir())} for {names}")
    for name in names:
        if (a / name).read_bytes() != (b / name).read_bytes():
            raise Failure(f"exported {name} differs from its source")


def run(case, program, work):
    folder, exported = work / "model", work / "exported"
    make(case, folder)
    model = load(folder)
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    ids = torch.randint(0, case["text"]["vocab_size"], (case["rows"], case["tokens"]), generator=generator)
    save_file({"input_ids": ids}, work / "ids.safetensors")
    reference = compute(model, ids)
    call(program, "model", "run", folder, "--ids", work / "ids.safetensors", "--output", work / "ours.safetensors",
         "--greedy", GREEDY, "--threads", 1)
    ours = load_file(work / "ours.safetensors")
    if not torch.equal(ours["input_ids"], ids):
        raise Failure("input_ids differ")
    bound = 2e-4 if case["family"] in HYBRID else 1e-4
    gaps = compare(ours, reference, model, case["rows"])
    wide = {}
    if max(gaps.values()) > bound:
        hybrid = case["family"] in HYBRID
        with in_double(model, wide_angles=hybrid):
            exact = compute(model, ids)
            wide = compare(ours, exact, model, case["rows"])
            own = compare(reference, exact, model, case["rows"])
        if max(wide.values()) > (bound if hybrid else 2 * max(own.values())):
            raise Failure(f"gaps {gaps}, to f64 {wide}; of transformers' f32 to f64 {own}")
    call(program, "model", "export", folder, exported)
    same_files(folder, exported)
    again = compute(load(exported), ids, greedy=False)
    if not torch.equal(again["logits"], reference["logits"]):
        raise Failure("transformers gives other logits for the exported folder")
    return gaps, wide


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for cases that fail")
    parser.add_argument("--case", type=int, help="this case alone")
    options = parser.parse_args()
    worst, widest = collections.defaultdict(dict), collections.defaultdict(dict)
    counts, judged_wide, failed = collections.Counter(), collections.Counter(), []
    seed, done = options.seed, 0
    while done < options.cases:
        case = draw(seed if options.case is None else options.case)
        seed += 1
        if options.family and case["family"] != options.family:
            continue
        done += 1
        family = case["family"]
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            try:
                gaps, wide = run(case, options.program, work)
            except KeyboardInterrupt:
                break
            except Exception as problem:
                failed.append(case["seed"])
                kind = "" if isinstance(problem, Failure) else f"{type(problem).__name__}: "
                print(f"FAILED case {case['seed']}: {kind}{problem}\n  {json.dumps(case)}", flush=True)
                if options.keep:
                    shutil.copytree(work, options.keep / str(case["seed"]), dirs_exist_ok=True)
                continue
        counts[family] += 1
        judged_wide[family] += bool(wide)
        for table, values in ((worst, gaps if not wide else {}), (widest, wide)):
            for name, value in values.items():
                table[family][name] = max(table[family].get(name, 0.0), value)
        if options.case is not None:
            print(gaps, wide)
            break
    for family in sorted(counts):
        text = ", ".join(f"{name} {value:.1e}" for name, value in worst[family].items())
        print(f"{family}: {counts[family]} cases, worst {text}")
        if judged_wide[family]:
            text = ", ".join(f"{name} {value:.1e}" for name, value in widest[family].items())
            print(f"  {judged_wide[family]} of them against f64: worst {text}")
    print(f"{sum(counts.values())} cases passed, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
