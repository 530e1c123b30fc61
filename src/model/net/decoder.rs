//! The decoder layer that all families share: `x += mixer(norm(x)); x += mlp(norm(x))`.

use super::{
    attention::Attention, delta_net::DeltaNet, mlp::Mlp, norm::Norm, parameters::Parameters, policy::Block,
    PackedLayout,
};
use tch::Tensor;

/// One layer, put together by its family.
pub(super) struct DecoderLayer {
    pub parameters: Parameters,
    pub input_norm: Norm,
    pub mixer: Mixer,
    pub post_norm: Norm,
    pub mlp: Mlp,
}

/// What mixes the tokens of a layer.
pub(super) enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// Gated delta net.
    DeltaNet(DeltaNet),
}

impl Block for DecoderLayer {
    fn name(&self) -> &str {
        self.parameters.prefix()
    }

    fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let a = self.input_norm.apply(x);
        let x = x + match &self.mixer {
            Mixer::Attention(attention) => attention.forward(&a, layout),
            Mixer::DeltaNet(net) => net.forward(&a, layout),
        };
        let m = self.post_norm.apply(&x);
        if layout.expert_group().is_some() && matches!(self.mlp, Mlp::Sparse(_)) {
            // The rows of the experts leave this rank: what lies before them is behind a cut.
            let parts = layout.cut(&[&x, &m]);
            return &parts[0] + self.mlp.forward(&parts[1], layout);
        }
        x + self.mlp.forward(&m, layout)
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        self.parameters.all()
    }
}
