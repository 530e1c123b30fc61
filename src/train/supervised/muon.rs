//! Optimizers of the supervised start. Muon (Jordan et al., 2024) moves a matrix along its momentum
//! with all singular values brought near one; on the small matrices here that costs little and reaches
//! the copying behaviour in a fraction of Adam's steps. Embeddings and norms take Adam.

use tch::{no_grad, Kind, Tensor};

const MUON_MOMENTUM: f64 = 0.95;
const ADAM_BETAS: (f64, f64) = (0.9, 0.95);
const ADAM_EPS: f64 = 1e-8;

enum Rule {
    Muon { momentum: Tensor },
    Adam { mean: Tensor, square: Tensor },
}

/// Muon for the matrices of the layers, Adam for everything else.
pub(super) struct Optimizer {
    entries: Vec<(Tensor, Rule)>,
    steps: i32,
}

impl Optimizer {
    /// `parameters` under their checkpoint names.
    pub(super) fn new(parameters: Vec<(String, Tensor)>) -> Self {
        let entries = parameters
            .into_iter()
            .map(|(name, parameter)| {
                let zeros = || parameter.zeros_like();
                let is_matrix = parameter.dim() == 2 || is_stack(&parameter);
                let rule = if name.contains(".layers.") && is_matrix {
                    Rule::Muon { momentum: zeros() }
                } else {
                    Rule::Adam {
                        mean: zeros(),
                        square: zeros(),
                    }
                };
                (parameter, rule)
            })
            .collect();
        Self { entries, steps: 0 }
    }

    /// One step along the gradients, which are cleared.
    pub(super) fn step(&mut self, muon_rate: f64, adam_rate: f64) {
        self.steps += 1;
        let (b1, b2) = ADAM_BETAS;
        let rate = adam_rate * (1.0 - b2.powi(self.steps)).sqrt() / (1.0 - b1.powi(self.steps));
        no_grad(|| {
            for (parameter, rule) in &mut self.entries {
                let mut gradient = parameter.grad();
                if !gradient.defined() {
                    continue;
                }
                match rule {
                    Rule::Muon { momentum } => {
                        let _ = momentum.lerp_(&gradient, 1.0 - MUON_MOMENTUM);
                        let direction = orthogonalized(&gradient.lerp(momentum, MUON_MOMENTUM));
                        let size = parameter.size();
                        let (rows, columns) = (size[size.len() - 2], size[size.len() - 1]);
                        let scale = (rows as f64 / columns as f64).max(1.0).sqrt();
                        let _ = parameter.g_sub_(&(direction * (muon_rate * scale)));
                    }
                    Rule::Adam { mean, square } => {
                        let _ = mean.lerp_(&gradient, 1.0 - b1);
                        let _ = square.lerp_(&gradient.square(), 1.0 - b2);
                        let change = &*mean / (square.sqrt() + ADAM_EPS);
                        let _ = parameter.g_sub_(&(change * rate));
                    }
                }
                let _ = gradient.zero_();
            }
        });
    }
}

/// The matrices of all experts; the weights of a convolution `[channels, 1, taps]` are none.
fn is_stack(parameter: &Tensor) -> bool {
    parameter.dim() == 3 && parameter.size()[1] > 1
}

/// The matrix, or each matrix of a stack, with its singular values brought near one, by five Newton-Schulz
/// iterations with the coefficients of Jordan et al.
fn orthogonalized(matrix: &Tensor) -> Tensor {
    let size = matrix.size();
    let tall = size[size.len() - 2] > size[size.len() - 1];
    let norm = matrix
        .square()
        .sum_dim_intlist(&[-2i64, -1][..], true, None::<Kind>)
        .sqrt();
    let mut x = matrix / (norm + 1e-7);
    if tall {
        x = x.transpose(-2, -1);
    }
    for _ in 0..5 {
        let gram = x.matmul(&x.transpose(-2, -1));
        let mix = &gram * -4.7750 + gram.matmul(&gram) * 2.0315;
        x = &x * 3.4445 + mix.matmul(&x);
    }
    if tall {
        x.transpose(-2, -1)
    } else {
        x
    }
}
