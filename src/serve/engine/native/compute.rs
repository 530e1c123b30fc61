//! What computes the steps of an engine: threads of the host, or a GPU.

use super::{
    cache::RoutingMemory,
    device::DeviceNetwork,
    forward::SequenceWork,
    sampler::Draw,
    states::StateOp,
    weights::EngineWeights,
    workers::{WorkerDied, Workers},
};
use crate::base::{WeightError, WeightTensor};

/// One of the two.
pub(super) enum Compute {
    Host(Workers),
    Device(Box<DeviceNetwork>),
}

/// Weights in the form that the engine's place of computation takes.
pub(super) enum LoadedWeights {
    /// Laid out for the host.
    Host(EngineWeights),
    /// As they came.
    Device(Vec<WeightTensor>),
}

impl Compute {
    /// Uses these weights from the next step on. The inner error leaves the old ones in use.
    pub(super) fn set_weights(
        &mut self,
        weights: LoadedWeights,
    ) -> Result<Result<(), WeightError>, WorkerDied> {
        match (self, weights) {
            (Compute::Host(workers), LoadedWeights::Host(weights)) => workers.set_weights(weights).map(Ok),
            (Compute::Device(network), LoadedWeights::Device(tensors)) => Ok(network.set_weights(&tensors)),
            _ => unreachable!("the engine prepares weights for its own place of computation"),
        }
    }

    /// Moves delta-net states before a step; a network on a GPU has none.
    pub(super) fn move_states(&self, ops: &[StateOp]) {
        if let Compute::Host(workers) = self {
            workers.move_states(ops);
        }
    }

    /// Experts of the cached tokens.
    pub(super) fn routing(&self) -> &RoutingMemory {
        match self {
            Compute::Host(workers) => workers.routing(),
            Compute::Device(network) => network.routing(),
        }
    }

    /// Computes a step; the draws come in the order of the sequences that sample.
    pub(super) fn step(&self, works: Vec<SequenceWork>) -> Result<Vec<Option<Draw>>, WorkerDied> {
        match self {
            Compute::Host(workers) => workers.step(works),
            Compute::Device(network) => Ok(network.step(&works)),
        }
    }
}
