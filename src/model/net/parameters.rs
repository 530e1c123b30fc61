//! The tensors of one layer, found by the rest of their name.

use tch::Tensor;

/// Parameters of a layer under their checkpoint names, in checkpoint order.
pub(super) struct Parameters {
    prefix: String,
    list: Vec<(String, Tensor)>,
}

impl Parameters {
    pub(super) fn new(prefix: String, list: Vec<(String, Tensor)>) -> Self {
        Self { prefix, list }
    }

    /// What all names start with.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A handle to the tensor `prefix.suffix`, if the layer has one.
    pub(super) fn find(&self, suffix: &str) -> Option<Tensor> {
        let wanted = format!("{}.{suffix}", self.prefix);
        let named = self.list.iter().find(|(name, _)| *name == wanted);
        named.map(|(_, tensor)| tensor.shallow_clone())
    }

    /// A tensor that the table of the family names.
    pub(super) fn tensor(&self, suffix: &str) -> Tensor {
        let found = self.find(suffix);
        found.unwrap_or_else(|| unreachable!("{} has no {suffix}: its own table says so", self.prefix))
    }

    /// `module.weight`, with `module.bias` where there is one.
    pub(super) fn projection(&self, module: &str) -> Projection {
        Projection {
            weight: self.tensor(&format!("{module}.weight")),
            bias: self.find(&format!("{module}.bias")),
        }
    }

    /// Shallow clones of all.
    pub(super) fn all(&self) -> Vec<(String, Tensor)> {
        let clone = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        self.list.iter().map(clone).collect()
    }
}

/// `x·Wᵀ + b`.
pub(super) struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Projection {
    /// In the element type of `x`.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let bias = self.bias.as_ref().map(|b| b.to_kind(x.kind()));
        x.linear(&self.weight.to_kind(x.kind()), bias)
    }
}
