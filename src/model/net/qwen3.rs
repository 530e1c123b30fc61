//! The dense Qwen3 layer:
//!
//! ```text
//! a = input_layernorm(x)
//! q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ            [T, heads, d]
//! q, k = rotate(q_norm(q)), rotate(k_norm(k))
//! x = x + attention(q, k, v)·Woᵀ            causal, scale d^-1/2, query heads share key heads in runs
//! m = post_attention_layernorm(x)
//! x = x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```

use super::{
    attention::packed_attention,
    layout::rotate,
    policy::{rms_norm, Block},
    PackedLayout,
};
use crate::model::hf::ModelConfig;
use tch::Tensor;

/// One decoder layer.
pub(super) struct Qwen3Block {
    name: String,
    eps: f64,
    rope_theta: f64,
    head_dim: i64,
    /// In checkpoint order.
    parameters: Vec<(String, Tensor)>,
    input_norm: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    q_norm: Tensor,
    k_norm: Tensor,
    post_norm: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
}

/// `x·Wᵀ + b`.
struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Projection {
    fn apply(&self, x: &Tensor) -> Tensor {
        x.linear(&self.weight, self.bias.as_ref())
    }
}

impl Qwen3Block {
    /// `parameters` are those of [`ModelConfig::layer_table`], in its order.
    pub(super) fn new(config: &ModelConfig, layer: usize, parameters: Vec<(String, Tensor)>) -> Self {
        let name = format!("model.layers.{layer}");
        let find = |suffix: &str| {
            let wanted = format!("{name}.{suffix}");
            parameters
                .iter()
                .find(|(n, _)| *n == wanted)
                .map(|(_, t)| t.shallow_clone())
        };
        // The table that names them is the one that built the list.
        let tensor = |suffix: &str| find(suffix).unwrap_or_else(|| panic!("{name} has no {suffix}"));
        let projection = |module: &str| Projection {
            weight: tensor(&format!("{module}.weight")),
            bias: find(&format!("{module}.bias")),
        };
        Self {
            eps: config.rms_norm_eps,
            rope_theta: config.rope_theta,
            head_dim: config.head_dim as i64,
            input_norm: tensor("input_layernorm.weight"),
            q: projection("self_attn.q_proj"),
            k: projection("self_attn.k_proj"),
            v: projection("self_attn.v_proj"),
            o: projection("self_attn.o_proj"),
            q_norm: tensor("self_attn.q_norm.weight"),
            k_norm: tensor("self_attn.k_norm.weight"),
            post_norm: tensor("post_attention_layernorm.weight"),
            gate: projection("mlp.gate_proj"),
            up: projection("mlp.up_proj"),
            down: projection("mlp.down_proj"),
            name,
            parameters,
        }
    }

    fn attention(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let heads = |t: Tensor| t.view([t.size()[0], t.size()[1] / self.head_dim, self.head_dim]);
        let (cos, sin) = layout.rope(self.rope_theta, self.head_dim);
        let q = rotate(
            &rms_norm(&heads(self.q.apply(x)), &self.q_norm, self.eps),
            &cos,
            &sin,
        );
        let k = rotate(
            &rms_norm(&heads(self.k.apply(x)), &self.k_norm, self.eps),
            &cos,
            &sin,
        );
        let v = heads(self.v.apply(x));
        self.o.apply(&packed_attention(&q, &k, &v, layout))
    }
}

impl Block for Qwen3Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let x = x + self.attention(&rms_norm(x, &self.input_norm, self.eps), layout);
        let m = rms_norm(&x, &self.post_norm, self.eps);
        &x + self.down.apply(&(self.gate.apply(&m).silu() * self.up.apply(&m)))
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        let clone = |(n, t): &(String, Tensor)| (n.clone(), t.shallow_clone());
        self.parameters.iter().map(clone).collect()
    }
}
