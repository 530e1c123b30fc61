//! Bytes per GPU of a training step and of an engine, part by part.
//!
//! Trainer, with `T` tokens of a micro-batch on a rank, `s` bytes of a computed number (8 for a family with a
//! delta net where the others compute in f32) and state sharded over `R` ranks:
//!
//! | Part | Bytes |
//! |---|---|
//! | weights, master copy, gradients, moments | parameters x bytes of each / R |
//! | reference | parameters x bytes of a weight / R, where a frozen policy stays on the device |
//! | critic | parameters x (weight, gradient and moments) / R, under ADV_ESTIMATOR=gae |
//! | gathered layer | two layers of weights (the next one is fetched meanwhile) and one of gradients, for R > 1; of the experts those of one of EP_SIZE ranks |
//! | block inputs | layers x T x hidden x s |
//! | kept activations | what the backward pass reads, of every block that is not recomputed |
//! | one block | what the backward pass reads of one block, and its gradients |
//! | head | rows of logits at a time x vocabulary x bytes that exist of a logit |
//! | context | CUDA context and library workspaces |
//!
//! What the backward pass reads is counted per token from the layer's definition ([`saved_per_token`]).
//! The parts are added although the head and a block never live at the same time: a caching allocator
//! does not give one's memory to the other, since their sizes differ.

use super::shape::ModelShape;

/// Bytes of a CUDA context with the kernels of cuBLAS loaded: 740 MiB on an H200 with CUDA 13 (518 MiB
/// before the first matrix product).
pub const CONTEXT_BYTES: u64 = 740 << 20;

/// Chunk of the delta rule: a layer keeps matrices of chunk x chunk a head.
const DELTA_CHUNK: u64 = 64;

/// How gradients are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    /// By automatic differentiation: the inputs of every operation stay.
    Autograd,
    /// By a hand-written pass: results of matrix products and attention stay, the rest is computed again.
    Written,
}

/// Parallel plan of the trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainPlan {
    /// Ranks over which state is sharded.
    pub shards: u64,
    /// Ranks that share the experts of a gathered layer.
    pub expert_shards: u64,
    /// Bytes of a weight.
    pub weight_bytes: u64,
    /// Bytes of a gradient.
    pub gradient_bytes: u64,
    /// Bytes of both moments of a parameter.
    pub moment_bytes: u64,
    /// Bytes of a master weight; 0 when the weight is its own.
    pub master_bytes: u64,
    /// Bytes of a weight of the frozen reference on the device; 0 without one.
    pub reference_bytes: u64,
    /// Bytes of a weight of the critic with its gradient and moments; 0 without one. Its trunk is the policy's.
    pub critic_bytes: u64,
    /// Bytes of a computed number; 4 stands for 8 in families with a delta net, but for weights that are gathered.
    pub compute_bytes: u64,
    /// Tokens of a micro-batch on a rank.
    pub tokens: u64,
    /// Blocks whose activations stay; the others are recomputed.
    pub kept_blocks: u64,
    /// How gradients are computed.
    pub backward: Backward,
    /// Rows of logits that exist at the same time.
    pub head_rows: u64,
    /// Computes on a GPU.
    pub gpu: bool,
}

/// An engine replica's share on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnginePlan {
    /// Ranks that share the heads.
    pub tensor_parallel: u64,
    /// Bytes of a weight, and of a cached number; 4 stands for 8 in families with a delta net, whose f32 is computed
    /// in f64.
    pub number_bytes: u64,
    /// Tokens that the cache holds.
    pub cache_tokens: u64,
    /// Sequences in the running batch.
    pub sequences: u64,
    /// States of a delta net that are reserved for each of them.
    pub states: u64,
    /// Computes on a GPU.
    pub gpu: bool,
}

/// Bytes by part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Name and bytes; parts of nothing are left out.
    pub parts: Vec<(&'static str, u64)>,
}

impl Estimate {
    fn new(parts: Vec<(&'static str, u64)>) -> Self {
        Self {
            parts: parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect(),
        }
    }

    /// All parts.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The parts in one line.
    pub fn describe(&self) -> String {
        let parts: Vec<String> = self
            .parts
            .iter()
            .map(|(name, bytes)| format!("{name} {}", size(*bytes)))
            .collect();
        parts.join(", ")
    }
}

/// A size with its unit (powers of 1024).
pub fn size(bytes: u64) -> String {
    const GIB: f64 = (1u64 << 30) as f64;
    let value = bytes as f64;
    match value / GIB {
        gib if gib >= 10240.0 => format!("{:.1} TiB", gib / 1024.0),
        gib if gib >= 10.0 => format!("{gib:.0} GiB"),
        gib if gib >= 0.1 => format!("{gib:.1} GiB"),
        _ if bytes >= 1 << 20 => format!("{:.0} MiB", value / (1u64 << 20) as f64),
        _ => format!("{bytes} B"),
    }
}

/// Memory of a trainer rank.
pub fn train(shape: &ModelShape, plan: &TrainPlan) -> Estimate {
    let parameters = shape.parameters();
    let share = |bytes: u64| (parameters * bytes).div_ceil(plan.shards.max(1));
    let gathered = if plan.shards > 1 {
        shape.gathered_parameters(plan.expert_shards) * (2 * plan.compute_bytes + plan.gradient_bytes)
    } else {
        0
    };
    let number_bytes = computed_bytes(shape, plan.compute_bytes);
    let block = saved_per_token(shape, plan.backward, number_bytes) * plan.tokens * number_bytes;
    let kept = plan.kept_blocks.min(shape.layers);
    // A kept block's activations are there already; only its gradients are new.
    let one_block = if kept == shape.layers { block } else { 2 * block };
    Estimate::new(vec![
        ("weights", share(plan.weight_bytes)),
        ("master", share(plan.master_bytes)),
        ("gradients", share(plan.gradient_bytes)),
        ("moments", share(plan.moment_bytes)),
        ("reference", share(plan.reference_bytes)),
        ("critic", share(plan.critic_bytes)),
        ("gathered layer", gathered),
        (
            "block inputs",
            shape.layers * plan.tokens * shape.hidden * number_bytes,
        ),
        ("kept activations", kept * block),
        ("one block", one_block),
        (
            "head",
            plan.head_rows.min(plan.tokens) * shape.vocab * logit_bytes(plan.backward, number_bytes),
        ),
        ("context", if plan.gpu { CONTEXT_BYTES } else { 0 }),
    ])
}

/// Memory of an engine rank. Key-value heads that the ranks cannot divide are copied to each.
pub fn engine(shape: &ModelShape, plan: &EnginePlan) -> Estimate {
    let ranks = plan.tensor_parallel.max(1);
    let kv_heads = shape.kv_heads.div_ceil(ranks);
    let number = computed_bytes(shape, plan.number_bytes);
    let per_token = shape.attention_layers * 2 * kv_heads * shape.head_dim * number;
    let state = shape.delta.map_or(0, |d| {
        let matrix = d.value_heads * d.key_dim * d.value_dim * number.max(4);
        let taps = (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim) * (d.taps - 1) * number;
        (shape.layers - shape.attention_layers) * (matrix + taps).div_ceil(ranks)
    });
    Estimate::new(vec![
        ("weights", (shape.parameters() * number).div_ceil(ranks)),
        ("key-value cache", plan.cache_tokens.saturating_mul(per_token)),
        ("delta-net states", plan.sequences * plan.states * state),
        ("logits", plan.sequences * shape.vocab * 4),
        ("context", if plan.gpu { CONTEXT_BYTES } else { 0 }),
    ])
}

/// Bytes of a number that is computed with: 4 stands for 8 in families with a delta net, whose f32 is computed in f64.
fn computed_bytes(shape: &ModelShape, bytes: u64) -> u64 {
    match bytes {
        4 if shape.delta.is_some() => 8,
        bytes => bytes,
    }
}

/// Bytes that exist of one logit at the peak of the head.
fn logit_bytes(backward: Backward, compute: u64) -> u64 {
    let wide = compute.max(4);
    match backward {
        // The product, its copy in f32 or wider, the log-softmax, its gradient, and the product's gradient.
        Backward::Autograd => compute + 3 * wide + compute,
        // The product, and one buffer of f32 or wider that is turned into its own gradient.
        Backward::Written => compute + wide,
    }
}

/// Numbers that the backward pass of the largest kind of block reads, a token, without its input.
/// The unit is the computed number of `number_bytes`: one that is kept in f32 beside bf16 counts twice.
pub fn saved_per_token(shape: &ModelShape, backward: Backward, number_bytes: u64) -> u64 {
    let wide = 4u64.div_ceil(number_bytes);
    let mixer = attention(shape, backward).max(delta(shape, wide));
    let mlp = match &shape.experts {
        Some(_) => sparse_mlp(shape, wide).max(dense_mlp(shape, backward)),
        None => dense_mlp(shape, backward),
    };
    mixer + mlp
}

fn attention(shape: &ModelShape, backward: Backward) -> u64 {
    let (q, kv, h) = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.hidden,
    );
    let gate = if shape.gated_attention { 2 * q } else { 0 };
    match backward {
        // Normed input, q and k before and after norm and rotation, v, output, residual.
        Backward::Autograd => h + 2 * (q + kv) + kv + q + h + gate,
        // q, k, v, output, projected output.
        Backward::Written => q + 2 * kv + q + h + gate,
    }
}

fn delta(shape: &ModelShape, wide: u64) -> u64 {
    shape.delta.map_or(0, |d| {
        let (keys, values) = (d.key_heads * d.key_dim, d.value_heads * d.value_dim);
        // Normed input, projections with the output gate, convolution and its activation, residual.
        let projected = 2 * shape.hidden + (2 * keys + 2 * values) + 2 * (2 * keys + values);
        // Per value head in f32 or wider: three chunk matrices, four of key and three of value width.
        let chunked = d.value_heads * (3 * DELTA_CHUNK + 4 * d.key_dim + 3 * d.value_dim);
        projected + wide * chunked + 2 * values
    })
}

fn dense_mlp(shape: &ModelShape, backward: Backward) -> u64 {
    match backward {
        // Normed input, gate, up, activation, product.
        Backward::Autograd => shape.hidden + 4 * shape.intermediate,
        // Gate and up.
        Backward::Written => 2 * shape.intermediate,
    }
}

fn sparse_mlp(shape: &ModelShape, wide: u64) -> u64 {
    shape.experts.map_or(0, |e| {
        // A row of an expert: input, gate, up, activation, product, output.
        let routed = e.per_token * (2 * shape.hidden + 4 * e.intermediate);
        let shared = if e.shared > 0 {
            4 * e.shared + shape.hidden
        } else {
            0
        };
        // Normed input, router probabilities in f32 or wider.
        shape.hidden + wide * e.count + routed + shared
    })
}

#[cfg(test)]
mod tests;
