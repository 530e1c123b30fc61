//! What computes the steps of an engine: the host's own network, or the blocks that the trainer uses as well.

use super::{
    blocks::BlockNetwork,
    cache::RoutingMemory,
    forward::{Forward, SequenceWork},
    sampler::Draw,
    states::StateOp,
    weights::EngineWeights,
    workers::{WorkerDied, Workers},
};
use crate::{
    base::{WeightError, WeightTensor},
    model::{hf::ModelConfig, net::Device},
};

/// One of the two.
pub(super) enum Compute {
    Host(Workers<Forward>),
    Blocks(Box<Workers<BlockNetwork>>),
}

/// Whether the host's own network computes this family on this device: f32, without delta nets.
pub(super) fn is_on_host(model: &ModelConfig, device: Device) -> bool {
    device == Device::Cpu && !model.model_type.is_hybrid()
}

/// Weights in the form that the engine's network takes.
pub(super) enum LoadedWeights {
    /// Laid out for the host's own network.
    Host(EngineWeights),
    /// As they came.
    Blocks(Vec<WeightTensor>),
}

impl Compute {
    /// Uses these weights from the next step on. The inner error leaves the old ones in use.
    pub(super) fn set_weights(
        &mut self,
        weights: LoadedWeights,
    ) -> Result<Result<(), WeightError>, WorkerDied> {
        match (self, weights) {
            (Compute::Host(workers), LoadedWeights::Host(weights)) => {
                let network = workers.local().with_weights(weights);
                workers.replace(network).map(Ok)
            }
            (Compute::Blocks(workers), LoadedWeights::Blocks(tensors)) => {
                Ok(workers.local().set_weights(&tensors))
            }
            _ => unreachable!("the engine prepares weights for its own network"),
        }
    }

    /// Moves delta-net states before a step; the host's own network has none.
    pub(super) fn move_states(&self, ops: &[StateOp]) {
        if let Compute::Blocks(workers) = self {
            workers.local().move_states(ops);
        }
    }

    /// Experts of the cached tokens.
    pub(super) fn routing(&self) -> &RoutingMemory {
        match self {
            Compute::Host(workers) => &workers.local().routing,
            Compute::Blocks(workers) => workers.local().routing(),
        }
    }

    /// Computes a step; the draws come in the order of the sequences that sample.
    pub(super) fn step(&self, works: Vec<SequenceWork>) -> Result<Vec<Option<Draw>>, WorkerDied> {
        match self {
            Compute::Host(workers) => workers.step(works),
            Compute::Blocks(workers) => workers.step(works),
        }
    }
}
