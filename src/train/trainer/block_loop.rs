//! Forward and backward over a packed micro-batch, block by block.
//!
//! Forward without gradients keeps the input `[T,H]` of every block. Backward goes from the last block
//! to the first: the kept input becomes a leaf, the block runs again with gradients, and the
//! vector-Jacobian product with the incoming gradient gives the gradient of the input and of the block's
//! parameters. At any time the graph of one block exists. (Chen et al. 2016, "Training Deep Nets with
//! Sublinear Memory Cost", with segments of one block.) Where memory is plentiful, the forward pass may
//! keep the graph of every block instead ([`BackwardMode::BlockGraphs`]); the gradients are the same.
//!
//! Legend: T tokens, H hidden, N sampled tokens, V vocabulary.

use super::{
    head::{self, HeadInput},
    replay,
    samples::{Samples, TokenValues},
    BackwardMode, TrainerConfig,
};
use crate::{
    model::net::{PackedLayout, Policy},
    train::algorithm::SequenceDerivatives,
};
use std::collections::HashMap;
use tch::{no_grad, Device, Kind, Tensor};

/// Whole sequences in one packed row.
pub(super) struct PackedBatch {
    /// `[T]` i64.
    ids: Tensor,
    layout: PackedLayout,
    /// `[N]` i64: places in the row whose output predicts a sampled token.
    rows: Tensor,
    /// `[N]` i64: the sampled tokens.
    targets: Tensor,
    /// Sampled tokens by sequence.
    counts: Vec<usize>,
}

impl PackedBatch {
    pub(super) fn new(samples: &Samples, indices: &[usize], device: Device) -> Self {
        let mut ids = Vec::new();
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        let (mut lengths, mut counts) = (Vec::new(), Vec::new());
        for &index in indices {
            let sample = &samples.sequences[index];
            let start = ids.len() as i64;
            rows.extend(sample.sampled.iter().map(|&t| start + t as i64 - 1));
            targets.extend(sample.sampled.iter().map(|&t| sample.ids[t]));
            ids.extend_from_slice(&sample.ids);
            lengths.push(sample.ids.len());
            counts.push(sample.sampled.len());
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        Self {
            ids: tensor(&ids),
            layout: PackedLayout::new(&lengths, device),
            rows: tensor(&rows),
            targets: tensor(&targets),
            counts,
        }
    }

    /// Takes the experts of these sequences, the same as in [`PackedBatch::new`], from their records.
    pub(super) fn replaying(mut self, samples: &Samples, indices: &[usize]) -> Self {
        let device = self.ids.device();
        self.layout = match replay::experts(samples, indices, device) {
            Some(experts) => self.layout.with_replay(experts),
            None => self.layout,
        };
        self
    }

    /// Rows `[N,H]` of the residual stream `[T,H]` that predict a sampled token.
    pub(super) fn predicting(&self, hidden: &Tensor) -> Tensor {
        hidden.index_select(0, &self.rows)
    }

    /// Cuts one number per sampled token into those of each sequence.
    pub(super) fn split_column(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let mut rest = values;
        self.counts
            .iter()
            .map(|count| {
                let (head, tail) = rest.split_at(*count);
                rest = tail;
                head.to_vec()
            })
            .collect()
    }

    /// Cuts values of all sampled tokens into those of each sequence.
    pub(super) fn split(&self, values: TokenValues) -> Vec<TokenValues> {
        let columns = self
            .split_column(&values.logprobs)
            .into_iter()
            .zip(self.split_column(&values.entropies));
        columns
            .map(|(logprobs, entropies)| TokenValues { logprobs, entropies })
            .collect()
    }
}

/// Derivatives of the objective by all sampled tokens of a micro-batch.
pub(super) struct TokenDerivatives {
    logprobs: Vec<f64>,
    entropies: Vec<f64>,
}

impl TokenDerivatives {
    /// Of its sequences, in order.
    pub(super) fn join(sequences: &[SequenceDerivatives]) -> Self {
        let mut joined = Self {
            logprobs: Vec::new(),
            entropies: Vec::new(),
        };
        for sequence in sequences {
            joined.logprobs.extend_from_slice(&sequence.logprobs);
            joined.entropies.extend_from_slice(&sequence.entropies);
        }
        joined
    }
}

/// Gradients of all parameters, summed over micro-batches.
pub(super) struct Gradients {
    /// In the order of [`Policy::parameters`].
    pub tensors: Vec<Tensor>,
    places: HashMap<String, usize>,
}

impl Gradients {
    #[cfg(test)]
    pub(super) fn of(tensors: Vec<Tensor>) -> Self {
        Self {
            tensors,
            places: HashMap::new(),
        }
    }

    pub(super) fn zeros(parameters: Vec<(String, Tensor)>) -> Self {
        Self {
            tensors: parameters.iter().map(|(_, p)| p.detach().zeros_like()).collect(),
            places: parameters
                .into_iter()
                .enumerate()
                .map(|(i, (name, _))| (name, i))
                .collect(),
        }
    }

    /// Adds a gradient; one that autograd did not produce is zero.
    pub(super) fn add(&mut self, name: &str, gradient: &Tensor) {
        if gradient.defined() {
            let _ = self.tensors[self.places[name]].g_add_(gradient);
        }
    }

    /// Norm over all parameters.
    pub(super) fn global_norm(&self) -> f64 {
        // One look at the device for all tensors.
        let norms: Vec<Tensor> = self.tensors.iter().map(|g| g.norm()).collect();
        let norms = to_vec(&Tensor::stack(&norms, 0));
        norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt()
    }

    /// Scales all gradients so that their norm, now `norm`, is at most `limit`.
    pub(super) fn clip(&mut self, norm: f64, limit: f64) {
        if norm > limit {
            let factor = limit / (norm + 1e-6);
            for gradient in &mut self.tensors {
                let _ = gradient.g_mul_scalar_(factor);
            }
        }
    }
}

/// What a forward pass leaves for the backward pass.
pub(super) struct Kept {
    pub values: TokenValues,
    graph: Graph,
}

enum Graph {
    /// Nothing was kept.
    None,
    /// Block by block.
    Blocks {
        blocks: Vec<KeptBlock>,
        /// Output of the last block, `[T,H]`.
        last: Tensor,
    },
    /// Log-probabilities and entropies `[N]` with their whole graph.
    Whole { logprobs: Tensor, entropies: Tensor },
}

/// Input of a block, kept for the backward pass.
pub(super) struct KeptBlock {
    /// `[T,H]`.
    input: Tensor,
    /// With its graph back to `input`, where graphs are kept instead of computed again.
    output: Option<Tensor>,
}

/// A policy with the settings that its passes need.
pub(super) struct Network<'a> {
    policy: &'a Policy,
    config: &'a TrainerConfig,
}

impl<'a> Network<'a> {
    pub(super) fn new(policy: &'a Policy, config: &'a TrainerConfig) -> Self {
        Self { policy, config }
    }

    /// Log-probabilities and entropies of the sampled tokens. `keep` says that [`Network::backward`]
    /// will follow.
    pub(super) fn forward(&self, packed: &PackedBatch, keep: bool) -> Kept {
        if keep && self.config.backward == BackwardMode::WholeGraph {
            return self.forward_whole_graph(packed);
        }
        let (blocks, x) = self.trunk(packed, keep);
        let values = no_grad(|| head::values(&self.head(packed, &packed.predicting(&x))));
        let graph = if keep {
            Graph::Blocks { blocks, last: x }
        } else {
            Graph::None
        };
        Kept { values, graph }
    }

    /// Inputs of the blocks where they are to be kept, and the output of the last one, `[T,H]`.
    pub(super) fn trunk(&self, packed: &PackedBatch, keep: bool) -> (Vec<KeptBlock>, Tensor) {
        let mut x = no_grad(|| self.policy.embed(&packed.ids));
        let mut blocks = Vec::new();
        for block in self.policy.blocks() {
            if keep && self.config.backward == BackwardMode::BlockGraphs {
                let input = x.set_requires_grad(true);
                let output = block.forward(&input, &packed.layout);
                x = output.detach();
                blocks.push(KeptBlock {
                    input,
                    output: Some(output),
                });
            } else {
                let output = no_grad(|| block.forward(&x, &packed.layout));
                let input = std::mem::replace(&mut x, output);
                if keep {
                    blocks.push(KeptBlock { input, output: None });
                }
            }
        }
        (blocks, x)
    }

    fn head<'b>(&'b self, packed: &'b PackedBatch, hidden: &Tensor) -> HeadInput<'b> {
        HeadInput {
            policy: self.policy,
            hidden: hidden.shallow_clone(),
            targets: &packed.targets,
            divisor: self.config.logit_divisor(),
            chunk: self.config.head_chunk_tokens as i64,
        }
    }

    /// Adds the gradients of the objective to `gradients`.
    pub(super) fn backward(
        &self,
        packed: &PackedBatch,
        kept: Kept,
        derivatives: &TokenDerivatives,
        gradients: &mut Gradients,
    ) {
        let (blocks, last) = match kept.graph {
            Graph::Blocks { blocks, last } => (blocks, last),
            Graph::Whole { logprobs, entropies } => {
                return self.backward_whole_graph(&logprobs, &entropies, derivatives, gradients);
            }
            Graph::None => unreachable!("backward follows a forward pass that kept its inputs"),
        };
        let by_logprob = self.column(&derivatives.logprobs, &last);
        let by_entropy = derivatives
            .entropies
            .iter()
            .any(|d| *d != 0.0)
            .then(|| self.column(&derivatives.entropies, &last));

        // Head and final norm touch only the rows that predict a sampled token.
        let head = self.head(packed, &packed.predicting(&last));
        let norm_name = self.policy.config.norm_spec().name;
        let head_name = self
            .policy
            .config
            .head_spec()
            .map_or_else(|| self.policy.config.embedding_spec().name, |spec| spec.name);
        let norm = self.parameter(&norm_name);
        let by_rows = head::backward(&head, &norm, &by_logprob, by_entropy.as_ref(), |norm, weight| {
            gradients.add(&norm_name, norm);
            gradients.add(&head_name, weight);
        });
        self.trunk_backward(packed, blocks, last, &by_rows, gradients);
    }

    /// Adds the gradients of embedding and blocks, from the gradient `by_rows [N,H]` of the rows of `last`
    /// that predict a sampled token.
    pub(super) fn trunk_backward(
        &self,
        packed: &PackedBatch,
        blocks: Vec<KeptBlock>,
        last: Tensor,
        by_rows: &Tensor,
        gradients: &mut Gradients,
    ) {
        let mut incoming = last.zeros_like().index_copy(0, &packed.rows, by_rows);
        drop(last);

        for (block, kept) in self.policy.blocks().iter().zip(blocks).rev() {
            let (input, output) = match kept.output {
                Some(output) => (kept.input, output),
                None => {
                    let input = kept.input.detach().set_requires_grad(true);
                    let output = block.forward(&input, &packed.layout);
                    (input, output)
                }
            };
            let parameters = block.parameters();
            let mut wanted = vec![input];
            wanted.extend(parameters.iter().map(|(_, p)| p.shallow_clone()));
            let mut found = vector_jacobian(&output, &incoming, &wanted).into_iter();
            incoming = found
                .next()
                .unwrap_or_else(|| unreachable!("one gradient per input"));
            for ((name, _), gradient) in parameters.iter().zip(found) {
                gradients.add(name, &gradient);
            }
        }

        let embedded = self.policy.embed(&packed.ids);
        let embedding_name = self.policy.config.embedding_spec().name;
        let embedding = self.parameter(&embedding_name);
        for gradient in vector_jacobian(&embedded, &incoming, &[embedding]) {
            gradients.add(&embedding_name, &gradient);
        }
    }

    fn forward_whole_graph(&self, packed: &PackedBatch) -> Kept {
        let hidden = self.policy.forward_hidden(&packed.ids, &packed.layout);
        let normed = hidden.index_select(0, &packed.rows);
        let (logprobs, entropies) = head::whole(
            &normed,
            &self.policy.head_weight(),
            &packed.targets,
            self.config.logit_divisor(),
        );
        Kept {
            values: TokenValues {
                logprobs: to_vec(&logprobs),
                entropies: to_vec(&entropies),
            },
            graph: Graph::Whole { logprobs, entropies },
        }
    }

    fn backward_whole_graph(
        &self,
        logprobs: &Tensor,
        entropies: &Tensor,
        derivatives: &TokenDerivatives,
        gradients: &mut Gradients,
    ) {
        let sum = (logprobs * self.column(&derivatives.logprobs, logprobs)).sum(None)
            + (entropies * self.column(&derivatives.entropies, entropies)).sum(None);
        let parameters = self.policy.parameters();
        let wanted: Vec<Tensor> = parameters.iter().map(|(_, p)| p.shallow_clone()).collect();
        let found = Tensor::run_backward(&[sum], &wanted, false, false);
        for ((name, _), gradient) in parameters.iter().zip(found) {
            gradients.add(name, &gradient);
        }
    }

    /// `[N]` on the device of `like` and in its element type, at least f32.
    pub(super) fn column(&self, values: &[f64], like: &Tensor) -> Tensor {
        let kind = match like.kind() {
            Kind::BFloat16 => Kind::Float,
            kind => kind,
        };
        Tensor::from_slice(values).to_kind(kind).to_device(like.device())
    }

    pub(super) fn parameter(&self, name: &str) -> Tensor {
        self.policy
            .parameters()
            .into_iter()
            .find_map(|(n, p)| (n == name).then_some(p))
            .unwrap_or_else(|| unreachable!("the policy has a parameter {name}: its own table says so"))
    }
}

/// Gradients of `Σ output ∘ incoming` by `inputs`.
pub(super) fn vector_jacobian(output: &Tensor, incoming: &Tensor, inputs: &[Tensor]) -> Vec<Tensor> {
    Tensor::run_backward(&[(output * incoming).sum(None)], inputs, false, false)
}

/// Values of a vector.
pub(super) fn to_vec(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor
        .detach()
        .to_device(Device::Cpu)
        .to_kind(Kind::Double)
        .contiguous();
    let mut values = vec![0.0; flat.numel()];
    flat.copy_data(&mut values, flat.numel());
    values
}
