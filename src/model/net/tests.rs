//! The reference is a scalar f64 forward written as plain loops over the checkpoint's bytes.

use super::*;
use crate::{
    base::WeightTensor,
    model::hf::{save_folder, ModelConfig},
};
use std::collections::HashMap;
use tch::{no_grad, Device, Kind, Tensor};

fn tiny() -> ModelConfig {
    let mut config = ModelConfig::qwen3(29, 16, 24, 2, 4, 2, 8);
    config.initializer_range = 0.3;
    config
}

/// A policy whose norms are not all one, so that a forgotten norm shows.
fn policy(config: ModelConfig) -> Policy {
    // Waiting OpenMP threads spin, and tests run beside each other.
    tch::set_num_threads(1);
    let policy = Policy::random(config, 5, Device::Cpu);
    no_grad(|| {
        for (name, mut t) in policy.parameters() {
            if name.ends_with("norm.weight") {
                let steps = Tensor::arange(t.numel() as i64, (Kind::Float, Device::Cpu));
                t.copy_(&((steps * 0.7).sin() * 0.3 + 1.0));
            }
        }
    });
    policy
}

fn ids(n: usize, seed: usize) -> Vec<i64> {
    (0..n)
        .map(|i| ((i * 7 + seed * 11 + i * i) % 29) as i64)
        .collect()
}

struct Naive {
    config: ModelConfig,
    weights: HashMap<String, Vec<f64>>,
}

impl Naive {
    fn new(policy: &Policy) -> Self {
        let values = |t: WeightTensor| {
            let floats = t
                .data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64);
            (t.name, floats.collect())
        };
        Self {
            config: policy.config.clone(),
            weights: policy.export().into_iter().map(values).collect(),
        }
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.weights[name].chunks(x.len());
        rows.map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum())
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + self.config.rms_norm_eps).sqrt();
        x.iter()
            .zip(&self.weights[name])
            .map(|(v, w)| v * scale * w)
            .collect()
    }

    fn heads(&self, norm: Option<&str>, x: &[f64], position: usize) -> Vec<Vec<f64>> {
        let d = self.config.head_dim;
        let mut heads = Vec::new();
        for head in x.chunks(d) {
            let Some(norm) = norm else {
                heads.push(head.to_vec());
                continue;
            };
            let x = self.norm(norm, head);
            let mut y = x.clone();
            for i in 0..d / 2 {
                let angle = position as f64 * self.config.rope.theta.powf(-2.0 * i as f64 / d as f64);
                y[i] = x[i] * angle.cos() - x[i + d / 2] * angle.sin();
                y[i + d / 2] = x[i + d / 2] * angle.cos() + x[i] * angle.sin();
            }
            heads.push(y);
        }
        heads
    }

    /// Hidden states behind the final norm.
    fn forward(&self, ids: &[i64]) -> Vec<Vec<f64>> {
        let c = &self.config;
        let h = c.hidden_size;
        let mut xs: Vec<Vec<f64>> = ids
            .iter()
            .map(|&id| {
                self.weights["model.embed_tokens.weight"][id as usize * h..(id as usize + 1) * h].to_vec()
            })
            .collect();
        for layer in 0..c.num_hidden_layers {
            let n = |s: &str| format!("model.layers.{layer}.{s}");
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for (t, x) in xs.iter_mut().enumerate() {
                let a = self.norm(&n("input_layernorm.weight"), x);
                let project = |s: &str| self.linear(&n(&format!("self_attn.{s}_proj.weight")), &a);
                let q = self.heads(Some(&n("self_attn.q_norm.weight")), &project("q"), t);
                keys.push(self.heads(Some(&n("self_attn.k_norm.weight")), &project("k"), t));
                values.push(self.heads(None, &project("v"), t));
                let mut out = Vec::new();
                for (i, q) in q.iter().enumerate() {
                    let kv = i * c.num_key_value_heads / c.num_attention_heads;
                    let dot = |k: &Vec<Vec<f64>>| {
                        let s: f64 = k[kv].iter().zip(q).map(|(a, b)| a * b).sum();
                        (s / (c.head_dim as f64).sqrt()).exp()
                    };
                    let scores: Vec<f64> = keys.iter().map(dot).collect();
                    let total: f64 = scores.iter().sum();
                    for j in 0..c.head_dim {
                        out.push(scores.iter().zip(&values).map(|(s, v)| s * v[kv][j]).sum::<f64>() / total);
                    }
                }
                for (x, y) in x.iter_mut().zip(self.linear(&n("self_attn.o_proj.weight"), &out)) {
                    *x += y;
                }
                let m = self.norm(&n("post_attention_layernorm.weight"), x);
                let gate = self.linear(&n("mlp.gate_proj.weight"), &m);
                let up = self.linear(&n("mlp.up_proj.weight"), &m);
                let inner: Vec<f64> = gate
                    .iter()
                    .zip(up)
                    .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                    .collect();
                for (x, y) in x.iter_mut().zip(self.linear(&n("mlp.down_proj.weight"), &inner)) {
                    *x += y;
                }
            }
        }
        xs.iter().map(|x| self.norm("model.norm.weight", x)).collect()
    }
}

fn rows(t: &Tensor) -> Vec<Vec<f64>> {
    Vec::<Vec<f64>>::try_from(t.to_kind(Kind::Double)).unwrap()
}

fn largest_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let rows = a.iter().zip(b);
    rows.flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs()))
        .fold(0.0, f64::max)
}

#[test]
fn forward_equals_plain_loops_in_f64() {
    for tied in [true, false] {
        let mut config = tiny();
        config.tie_word_embeddings = tied;
        let policy = policy(config);
        let naive = Naive::new(&policy);
        let ids = ids(37, 1);
        let hidden = policy.forward_hidden(&Tensor::from_slice(&ids), &PackedLayout::single(37, Device::Cpu));
        let want = naive.forward(&ids);
        let difference = largest_difference(&rows(&hidden), &want);
        assert!(difference < 2e-5, "{difference}");
        assert_eq!(policy.head_weight().size(), [29, 16]);
        let name = if tied {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        assert_eq!(weight_from_tensor("", &policy.head_weight()).data, {
            let all = policy.export();
            all.iter().find(|t| t.name == name).unwrap().data.clone()
        });
    }
}

#[test]
fn packed_segments_do_not_see_each_other() {
    let policy = policy(tiny());
    let lengths = [5, 1, 0, 64, 17, 130];
    let parts: Vec<Vec<i64>> = lengths.iter().enumerate().map(|(i, &n)| ids(n, i)).collect();
    let packed = Tensor::from_slice(&parts.concat());
    let layout = PackedLayout::new(&lengths, Device::Cpu);
    let together = rows(&policy.forward_hidden(&packed, &layout));
    let mut alone = Vec::new();
    for part in parts.iter().filter(|p| !p.is_empty()) {
        let layout = PackedLayout::single(part.len(), Device::Cpu);
        alone.extend(rows(&policy.forward_hidden(&Tensor::from_slice(part), &layout)));
    }
    let difference = largest_difference(&together, &alone);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn a_row_without_tokens_gives_no_rows() {
    let none = Tensor::from_slice::<i64>(&[]);
    let hidden = policy(tiny()).forward_hidden(&none, &PackedLayout::new(&[0], Device::Cpu));
    assert_eq!(hidden.size(), [0, 16]);
}

#[test]
fn packed_gradients_are_the_sum_of_separate_ones() {
    let policy = policy(tiny());
    let lengths = [9, 70, 3];
    let parts: Vec<Vec<i64>> = lengths.iter().enumerate().map(|(i, &n)| ids(n, i)).collect();
    let gradients = |rows: &[Vec<i64>]| {
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        let hidden = policy.forward_hidden(
            &Tensor::from_slice(&rows.concat()),
            &PackedLayout::new(&lengths, Device::Cpu),
        );
        hidden.sin().sum(Kind::Float).backward();
        let take = |(name, mut p): (String, Tensor)| {
            let grad = p.grad().copy();
            p.zero_grad();
            (name, grad)
        };
        policy.parameters().into_iter().map(take).collect::<Vec<_>>()
    };
    let together = gradients(&parts);
    let alone: Vec<_> = parts.iter().map(|p| gradients(std::slice::from_ref(p))).collect();
    for (i, (name, grad)) in together.iter().enumerate() {
        let sum = &alone[0][i].1 + &alone[1][i].1 + &alone[2][i].1;
        let relative = (grad - &sum).norm().double_value(&[]) / sum.norm().double_value(&[]);
        assert!(relative < 1e-5, "{name}: {relative}");
    }
}

#[test]
fn block_gradient_passes_a_finite_difference_check() {
    let policy = policy(tiny());
    let ids = Tensor::from_slice(&ids(11, 3));
    let layout = PackedLayout::new(&[4, 7], Device::Cpu);
    let naive = |policy: &Policy| {
        let model = Naive::new(policy);
        let all = Vec::<i64>::try_from(&ids).unwrap();
        let rows = [model.forward(&all[..4]), model.forward(&all[4..])].concat();
        rows.iter().flatten().map(|v| v.sin()).sum::<f64>()
    };
    policy
        .forward_hidden(&ids, &layout)
        .sin()
        .sum(Kind::Float)
        .backward();
    for (name, mut parameter) in policy.parameters() {
        let grad = parameter.grad().flatten(0, -1);
        let index = grad.abs().argmax(0, false).int64_value(&[]);
        let analytic = grad.double_value(&[index]);
        let flat = parameter.detach().view(-1);
        let old = flat.double_value(&[index]);
        let at = |value: f64| {
            let _ = no_grad(|| flat.get(index).fill_(value));
            naive(&policy)
        };
        let step = 1e-2;
        let numeric = (at(old + step) - at(old - step)) / (2.0 * step);
        at(old);
        assert!(
            (numeric - analytic).abs() < 2e-2 * analytic.abs().max(0.1),
            "{name}: {numeric} {analytic}"
        );
        parameter.zero_grad();
    }
}

#[test]
fn random_weights_depend_on_the_seed_alone_and_have_the_right_spread() {
    let mut config = ModelConfig::qwen3(500, 64, 128, 1, 4, 2, 16);
    config.initializer_range = 0.02;
    let a = Policy::random(config.clone(), 1, Device::Cpu);
    tch::manual_seed(99);
    let b = Policy::random(config.clone(), 1, Device::Cpu);
    let c = Policy::random(config, 2, Device::Cpu);
    for ((x, y), z) in a.export().iter().zip(b.export()).zip(c.export()) {
        assert_eq!(x.data, y.data, "{}", x.name);
        assert!(x.name.ends_with("norm.weight") || x.data != z.data, "{}", x.name);
    }
    let embedding = &a.parameters()[0].1;
    assert!((embedding.std(true).double_value(&[]) - 0.02).abs() < 4e-4);
    assert!(embedding.mean(Kind::Float).double_value(&[]).abs() < 4e-4);
    assert!(a
        .parameters()
        .iter()
        .all(|(_, p)| p.requires_grad() && p.is_leaf()));
}

#[test]
fn weights_travel_through_a_folder_and_through_copy_from() {
    let config = tiny();
    let source = policy(config.clone());
    let dir = tempfile::tempdir().unwrap();
    save_folder(dir.path(), &config, &source.export(), None).unwrap();
    let loaded = Policy::load(dir.path(), Device::Cpu).unwrap();
    let other = Policy::random(config.clone(), 77, Device::Cpu);
    other.copy_from(&source.export()).unwrap();
    for ((a, b), c) in source.export().iter().zip(loaded.export()).zip(other.export()) {
        assert_eq!((&a.name, &a.data), (&b.name, &b.data));
        assert_eq!((&a.name, &a.data), (&c.name, &c.data));
    }

    // A refused update changes nothing.
    let before = other.export();
    let mut bad = Policy::random(config, 3, Device::Cpu).export();
    let last = bad.len() - 1;
    bad[last].shape = vec![3];
    assert!(other
        .copy_from(&bad)
        .unwrap_err()
        .to_string()
        .contains("model.norm.weight"));
    bad.truncate(last);
    assert!(other.copy_from(&bad).unwrap_err().to_string().contains("missing"));
    let mut extra = source.export();
    extra.push(WeightTensor {
        name: "model.extra".into(),
        ..extra[0].clone()
    });
    assert!(other
        .copy_from(&extra)
        .unwrap_err()
        .to_string()
        .contains("model.extra"));
    for (a, b) in before.iter().zip(other.export()) {
        assert_eq!(a.data, b.data);
    }
}

#[test]
fn a_folder_of_another_model_is_refused_by_name() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    save_folder(dir.path(), &config, &policy(config.clone()).export(), None).unwrap();
    let mut value = config.to_value();
    value["model_type"] = "gpt2".into();
    std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
    let error = Policy::load(dir.path(), Device::Cpu).err().unwrap().to_string();
    assert!(
        error.contains("`gpt2`") && error.contains("config.json"),
        "{error}"
    );
}
