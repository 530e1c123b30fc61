//! Forward and backward over a packed micro-batch, block by block.
//!
//! Forward without gradients keeps the input `[T,H]` of every block. Backward goes from the last block
//! to the first: the kept input becomes a leaf, the block runs again with gradients, and the
//! vector-Jacobian product with the incoming gradient gives the gradient of the input and of the block's
//! parameters. At any time the graph of one block exists. (Chen et al. 2016, "Training Deep Nets with
//! Sublinear Memory Cost", with segments of one block.) Where memory is plentiful, the forward pass may
//! keep the graph of every block instead ([`BackwardMode::BlockGraphs`]); the gradients are the same.
//!
//! Over several ranks the parameters of a block are gathered while the block before it computes, and its
//! gradients are summed while the next one does ([`super::shards`]). Ranks that share a sequence have equal
//! runs of one packed row, which is padded with tokens that nothing is learned from.
//!
//! Legend: T tokens (of this rank), H hidden, N sampled tokens (of this rank), V vocabulary.

use super::{
    head::{self, HeadInput},
    mesh::Mesh,
    replay,
    samples::{Samples, TokenValues},
    shards::{PendingGradients, Shards},
    BackwardMode, TrainError, TrainerConfig,
};
use crate::{
    model::net::{PackedLayout, Policy, Tape},
    train::algorithm::SequenceDerivatives,
};
use std::{collections::HashMap, ops::Range};
use tch::{no_grad, Device, Kind, Tensor};

/// Whole sequences in one packed row, or this rank's run of its tokens.
pub(super) struct PackedBatch {
    /// `[T]` i64.
    ids: Tensor,
    /// Of the whole row.
    layout: PackedLayout,
    /// `[N]` i64: places in the run whose output predicts a sampled token.
    rows: Tensor,
    /// `[N]` i64: the sampled tokens.
    targets: Tensor,
    /// Sampled tokens of the whole row by sequence.
    counts: Vec<usize>,
    /// Sampled tokens of the whole row by the rank that has them.
    shares: Vec<usize>,
    /// Which of them this rank has.
    own: Range<usize>,
}

impl PackedBatch {
    /// Without sequences there is a row of padding: all ranks of a mesh take part in every pass.
    pub(super) fn new(samples: &Samples, indices: &[usize], device: Device, mesh: Option<&Mesh>) -> Self {
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
        let (ranks, place) = mesh.map_or((1, 0), |mesh| (mesh.sequence.ranks(), mesh.sequence.index()));
        if mesh.is_some() {
            let padding = ids.len().max(1).next_multiple_of(ranks) - ids.len();
            ids.resize(ids.len() + padding, 0);
            lengths.push(padding);
        }
        let mut layout = PackedLayout::new(&lengths, device);
        if let Some(mesh) = mesh {
            layout = layout.with_groups(mesh.layer_groups());
        }
        let run = ids.len() / ranks;
        let mut shares = vec![0; ranks];
        rows.iter().for_each(|row| shares[*row as usize / run] += 1);
        let before: usize = shares[..place].iter().sum();
        let own = before..before + shares[place];
        let first = (place * run) as i64;
        let own_rows: Vec<i64> = rows[own.clone()].iter().map(|row| row - first).collect();
        let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        Self {
            ids: tensor(&ids[place * run..(place + 1) * run]),
            layout,
            rows: tensor(&own_rows),
            targets: tensor(&targets[own.clone()]),
            counts,
            shares,
            own,
        }
    }

    /// Numbers of all sampled tokens of the row, from those of this rank.
    pub(super) fn whole_column(&self, own: Vec<f64>, mesh: Option<&Mesh>) -> Result<Vec<f64>, TrainError> {
        match mesh.filter(|mesh| mesh.sequence.ranks() > 1) {
            None => Ok(own),
            Some(mesh) => {
                let phase = "values of a shared sequence";
                Ok(mesh.sequence.gather_numbers(phase, &own, &self.shares)?.concat())
            }
        }
    }

    /// This rank's part of numbers of all sampled tokens of the row.
    pub(super) fn own_part<'n>(&self, numbers: &'n [f64]) -> &'n [f64] {
        &numbers[self.own.clone()]
    }

    /// Takes the experts of these sequences, the same as in [`PackedBatch::new`], from their records.
    pub(super) fn replaying(mut self, samples: &Samples, indices: &[usize]) -> Self {
        let device = self.ids.device();
        let tokens = self.layout.num_tokens();
        self.layout = match replay::experts(samples, indices, tokens, device) {
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

/// Gradients of this rank's share of all parameters, summed over micro-batches.
pub(super) struct Gradients {
    /// In the order of [`Shards::trained`].
    pub tensors: Vec<Tensor>,
    places: HashMap<String, usize>,
    /// Sums over the ranks that have not arrived.
    pub pending: Vec<PendingGradients>,
}

impl Gradients {
    #[cfg(test)]
    pub(super) fn of(tensors: Vec<Tensor>) -> Self {
        Self {
            tensors,
            places: HashMap::new(),
            pending: Vec::new(),
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
            pending: Vec::new(),
        }
    }

    /// Adds a gradient; one that autograd did not produce is zero.
    pub(super) fn add(&mut self, name: &str, gradient: &Tensor) {
        if gradient.defined() {
            let _ = self.tensors[self.places[name]].g_add_(gradient);
        }
    }

    /// Sum of squares over all of them.
    pub(super) fn square(&self) -> f64 {
        // One look at the device for all tensors.
        let norms: Vec<Tensor> = self.tensors.iter().map(|g| g.norm()).collect();
        let norms = to_vec(&Tensor::stack(&norms, 0));
        norms.iter().map(|norm| norm * norm).sum::<f64>()
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
    output: Option<(Tensor, Tape)>,
}

/// A policy with its parameters and the settings that its passes need.
pub(super) struct Network<'a> {
    policy: &'a Policy,
    shards: &'a Shards,
    config: &'a TrainerConfig,
}

impl<'a> Network<'a> {
    pub(super) fn new(policy: &'a Policy, shards: &'a Shards, config: &'a TrainerConfig) -> Self {
        Self {
            policy,
            shards,
            config,
        }
    }

    pub(super) fn pack(&self, samples: &Samples, indices: &[usize]) -> PackedBatch {
        PackedBatch::new(samples, indices, self.policy.device(), self.shards.mesh())
    }

    /// Unit of the final norm and the head.
    fn last_unit(&self) -> usize {
        Shards::last(self.policy.blocks().len())
    }

    fn is_tied(&self) -> bool {
        self.policy.config.head_spec().is_none()
    }

    /// Gathers what the head needs. A tied head is the embedding.
    fn load_head(&self) -> Result<(), TrainError> {
        if self.is_tied() {
            self.shards.load(Shards::EMBEDDING)?;
        }
        self.shards.load(self.last_unit())
    }

    fn release_head(&self) {
        if self.is_tied() {
            self.shards.release(Shards::EMBEDDING);
        }
        self.shards.release(self.last_unit());
    }

    /// An error when ranks did not come to an exchange inside of a layer.
    fn check(&self) -> Result<(), TrainError> {
        self.shards.mesh().map_or(Ok(()), Mesh::check)
    }

    /// Log-probabilities and entropies of the sampled tokens. `keep` says that [`Network::backward`]
    /// will follow.
    pub(super) fn forward(&self, packed: &PackedBatch, keep: bool) -> Result<Kept, TrainError> {
        if keep && self.config.backward == BackwardMode::WholeGraph {
            return Ok(self.forward_whole_graph(packed));
        }
        let (blocks, x) = self.trunk(packed, keep)?;
        self.load_head()?;
        let own = no_grad(|| head::values(&self.head(packed, &packed.predicting(&x))));
        self.release_head();
        let mesh = self.shards.mesh();
        let values = TokenValues {
            logprobs: packed.whole_column(own.logprobs, mesh)?,
            entropies: packed.whole_column(own.entropies, mesh)?,
        };
        let graph = if keep {
            Graph::Blocks { blocks, last: x }
        } else {
            Graph::None
        };
        Ok(Kept { values, graph })
    }

    /// Inputs of the blocks where they are to be kept, and the output of the last one, `[T,H]`.
    pub(super) fn trunk(
        &self,
        packed: &PackedBatch,
        keep: bool,
    ) -> Result<(Vec<KeptBlock>, Tensor), TrainError> {
        let keep_graphs = keep && self.config.backward == BackwardMode::BlockGraphs;
        self.shards.load(Shards::EMBEDDING)?;
        self.shards.prefetch(1)?;
        let mut x = no_grad(|| self.policy.embed(&packed.ids));
        self.shards.release(Shards::EMBEDDING);
        let mut blocks = Vec::new();
        for (i, block) in self.policy.blocks().iter().enumerate() {
            let unit = i + 1;
            self.shards.load(unit)?;
            self.shards.prefetch(unit + 1)?;
            if keep_graphs {
                let input = x.set_requires_grad(true);
                let (output, tape) = packed.layout.taped(|| block.forward(&input, &packed.layout));
                x = output.detach();
                blocks.push(KeptBlock {
                    input,
                    output: Some((output, tape)),
                });
            } else {
                let output = no_grad(|| block.forward(&x, &packed.layout));
                let input = std::mem::replace(&mut x, output);
                if keep {
                    blocks.push(KeptBlock { input, output: None });
                }
                self.shards.release(unit);
            }
            self.check()?;
        }
        Ok((blocks, x))
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
    ) -> Result<(), TrainError> {
        let (blocks, last) = match kept.graph {
            Graph::Blocks { blocks, last } => (blocks, last),
            Graph::Whole { logprobs, entropies } => {
                self.backward_whole_graph(&logprobs, &entropies, derivatives, gradients);
                return Ok(());
            }
            Graph::None => unreachable!("backward follows a forward pass that kept its inputs"),
        };
        let by_logprob = self.column(packed.own_part(&derivatives.logprobs), &last);
        let by_entropy = derivatives
            .entropies
            .iter()
            .any(|d| *d != 0.0)
            .then(|| self.column(packed.own_part(&derivatives.entropies), &last));

        // Head and final norm touch only the rows that predict a sampled token.
        self.load_head()?;
        self.shards.prefetch(self.last_unit() - 1)?;
        let head = self.head(packed, &packed.predicting(&last));
        let norm_name = self.policy.config.norm_spec().name;
        let norm = self.parameter(&norm_name);
        let mut sums = [Tensor::new(), Tensor::new()];
        let by_rows = head::backward(&head, &norm, &by_logprob, by_entropy.as_ref(), |norm, weight| {
            for (sum, more) in sums.iter_mut().zip([norm, weight]) {
                if sum.defined() {
                    let _ = sum.g_add_(more);
                } else {
                    *sum = more.copy();
                }
            }
        });
        self.release_head();
        let [by_norm, by_weight] = sums;
        let unit = self.last_unit();
        match self.policy.config.head_spec() {
            Some(spec) => {
                let found = [(&norm_name[..], by_norm), (&spec.name[..], by_weight)];
                self.shards.add_gradients(unit, &found, gradients)?;
            }
            None => {
                let embedding = self.policy.config.embedding_spec().name;
                self.shards
                    .add_gradients(unit, &[(&norm_name[..], by_norm)], gradients)?;
                self.shards
                    .add_gradients(Shards::EMBEDDING, &[(&embedding[..], by_weight)], gradients)?;
            }
        }
        self.trunk_backward(packed, blocks, last, &by_rows, gradients)
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
    ) -> Result<(), TrainError> {
        let mut incoming = last.zeros_like().index_copy(0, &packed.rows, by_rows);
        drop(last);

        for (i, kept) in blocks.into_iter().enumerate().rev() {
            let (block, unit) = (&self.policy.blocks()[i], i + 1);
            self.shards.load(unit)?;
            self.shards.prefetch(unit - 1)?;
            let (input, (output, tape)) = match kept.output {
                Some(output) => (kept.input, output),
                None => {
                    let input = kept.input.detach().set_requires_grad(true);
                    let output = packed.layout.taped(|| block.forward(&input, &packed.layout));
                    (input, output)
                }
            };
            let parameters = block.parameters();
            let mut wanted = vec![input];
            wanted.extend(parameters.iter().map(|(_, p)| p.shallow_clone()));
            let mut found = tape.vector_jacobian(&output, &incoming, &wanted).into_iter();
            incoming = found
                .next()
                .unwrap_or_else(|| unreachable!("one gradient per input"));
            drop((output, wanted));
            self.check()?;
            self.shards.release(unit);
            let named = parameters.iter().map(|(name, _)| &name[..]);
            let found: Vec<(&str, Tensor)> = named.zip(found).collect();
            self.shards.add_gradients(unit, &found, gradients)?;
        }

        self.shards.load(Shards::EMBEDDING)?;
        let embedded = self.policy.embed(&packed.ids);
        let name = self.policy.config.embedding_spec().name;
        let embedding = self.parameter(&name);
        let found = vector_jacobian(&embedded, &incoming, &[embedding]);
        drop(embedded);
        self.shards.release(Shards::EMBEDDING);
        for gradient in found {
            self.shards
                .add_gradients(Shards::EMBEDDING, &[(&name[..], gradient)], gradients)?;
        }
        Ok(())
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
