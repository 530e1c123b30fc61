//! Where this rank is among the ranks of the trainer, and how tensors travel between them.
//!
//! ```text
//! n ranks, SP_SIZE = s, EP_SIZE = e             rank r of the trainer
//!   all          n ranks                        everything that is not an expert is sharded over them
//!   sequence     s ranks in a row   r/s         share the tokens of one packed row
//!   data         n/s ranks          r mod s     have different sequences
//!   experts      e ranks in a row   r/e         share the experts of a layer
//!   replicas     n/e ranks          r mod e     have the same experts, which are sharded over them
//! ```
//!
//! Invariant: all ranks make the same calls in the same order, also where one has nothing to do; what they
//! decide by are numbers that are the same on all of them, bit for bit.

use super::{BackwardMode, TrainError};
use crate::{
    comm::{group, Collectives, CommError, Communicator, Element, Memory, Pending, Tag},
    model::{
        hf::ModelConfig,
        net::{Exchange, LayerGroups},
    },
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tch::{Kind, Tensor};

/// Which ranks train, and how they share the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshConfig {
    /// Ranks of the world, in the mesh's order; this one among them.
    pub ranks: Vec<u32>,
    /// Ranks that share the tokens of a row (`SP_SIZE`); divides their number.
    pub sequence: u32,
    /// Ranks that share the experts of a layer (`EP_SIZE`); divides their number.
    pub experts: u32,
    /// CUDA device of this process that holds the tensors; `None` where they are in host memory.
    pub device: Option<usize>,
    /// Longest wait for the other ranks in one operation.
    pub timeout: Duration,
}

/// The groups of the trainer that this rank is in.
pub struct Mesh {
    /// All ranks.
    pub(super) all: TensorGroup,
    /// Those with other sequences.
    pub(super) data: TensorGroup,
    /// Those that share this rank's sequences.
    pub(super) sequence: TensorGroup,
    /// Those that share the experts of a layer.
    pub(super) experts: TensorGroup,
    /// Those with the same experts.
    pub(super) replicas: TensorGroup,
    failure: Failure,
}

/// The first failure inside of a layer, where no error can be returned.
type Failure = Arc<Mutex<Option<CommError>>>;

impl Mesh {
    /// Builds the groups; all ranks of the mesh call it.
    ///
    /// # Errors
    /// Sizes that do not divide the number of ranks, by the name of their variable.
    pub fn new(comm: &Arc<dyn Communicator>, config: &MeshConfig) -> Result<Self, TrainError> {
        let ranks = &config.ranks;
        let (n, s, e) = (ranks.len(), config.sequence as usize, config.experts as usize);
        for (variable, size) in [("SP_SIZE", s), ("EP_SIZE", e)] {
            if size == 0 || !n.is_multiple_of(size) {
                return Err(TrainError::Config {
                    variable,
                    value: size.to_string(),
                    problem: "must divide the number of trainer ranks",
                });
            }
        }
        let Some(place) = ranks.iter().position(|rank| *rank == comm.rank()) else {
            return Err(CommError::NoSuchRank {
                rank: comm.rank(),
                size: n as u32,
            }
            .into());
        };
        let failure = Failure::default();
        let make = |number: u16, member: &dyn Fn(usize) -> bool| {
            let members: Vec<u32> = (0..n).filter(|r| member(*r)).map(|r| ranks[r]).collect();
            let group = group(comm.clone(), &members, Tag::group(number), config.timeout)?;
            let tensors = match config.device {
                _ if members.len() == 1 => None,
                Some(device) => Some(on_device(comm, &group, number, device, config.timeout)?),
                None => Some(group.clone()),
            };
            Ok::<_, CommError>(TensorGroup {
                numbers: group,
                tensors,
                failure: failure.clone(),
            })
        };
        Ok(Self {
            all: make(0, &|_| true)?,
            sequence: make(1, &|r| r / s == place / s)?,
            data: make(2, &|r| r % s == place % s)?,
            experts: make(3, &|r| r / e == place / e)?,
            replicas: make(4, &|r| r % e == place % e)?,
            failure,
        })
    }

    /// The groups of the layers; none where nothing is shared.
    pub(super) fn layer_groups(&self) -> LayerGroups {
        let some = |group: &TensorGroup| -> Option<Arc<dyn Exchange>> {
            (group.ranks() > 1).then(|| Arc::new(group.clone()) as Arc<dyn Exchange>)
        };
        LayerGroups {
            sequence: some(&self.sequence),
            experts: some(&self.experts),
        }
    }

    /// Refuses a policy whose heads or experts the ranks cannot share evenly.
    pub(super) fn check_policy(
        &self,
        policy: &ModelConfig,
        backward: BackwardMode,
    ) -> Result<(), TrainError> {
        let wrong = |variable, size: usize, problem| {
            Err(TrainError::Config {
                variable,
                value: size.to_string(),
                problem,
            })
        };
        let (s, e) = (self.sequence.ranks(), self.experts.ranks());
        let shared = |heads: usize| heads.is_multiple_of(s) || s.is_multiple_of(heads);
        if !policy.num_attention_heads.is_multiple_of(s) || !shared(policy.num_key_value_heads) {
            return wrong("SP_SIZE", s, "must divide the attention heads of the policy");
        }
        if let Some(delta) = &policy.linear_attention {
            if !delta.num_value_heads.is_multiple_of(s) || !shared(delta.num_key_heads) {
                return wrong(
                    "SP_SIZE",
                    s,
                    "must divide the value heads of the policy's delta net",
                );
            }
        }
        match &policy.experts {
            Some(experts) if experts.num_experts.is_multiple_of(e) => {}
            None if e == 1 => {}
            None => return wrong("EP_SIZE", e, "must be 1: the policy has no experts"),
            Some(_) => return wrong("EP_SIZE", e, "must divide the experts of the policy"),
        }
        if backward == BackwardMode::WholeGraph {
            unreachable!("one graph over the whole network is the oracle of tests, on one rank");
        }
        Ok(())
    }

    /// The first failure of an exchange inside of a layer. What was computed since then is of no use.
    pub(super) fn check(&self) -> Result<(), TrainError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// The same group between the memories of devices.
#[cfg(feature = "cuda")]
fn on_device(
    comm: &Arc<dyn Communicator>,
    group: &Arc<dyn Collectives>,
    number: u16,
    device: usize,
    timeout: Duration,
) -> Result<Arc<dyn Collectives>, CommError> {
    crate::comm::nccl_group(comm.clone(), &**group, Tag::notes(number), device, timeout)
}

/// The same group between the memories of devices.
#[cfg(not(feature = "cuda"))]
fn on_device(
    _comm: &Arc<dyn Communicator>,
    group: &Arc<dyn Collectives>,
    _number: u16,
    _device: usize,
    _timeout: Duration,
) -> Result<Arc<dyn Collectives>, CommError> {
    Err(CommError::Device {
        rank: group.members()[group.place()],
        phase: "start of NCCL".into(),
        problem: "this program was built without CUDA".into(),
    })
}

/// Tensors between the ranks of one group.
#[derive(Clone)]
pub(super) struct TensorGroup {
    /// For plain numbers, in host memory.
    numbers: Arc<dyn Collectives>,
    /// For tensors, where they are: `numbers` would take an address of a device for one of the host. A rank alone
    /// has nobody to exchange with.
    tensors: Option<Arc<dyn Collectives>>,
    failure: Failure,
}

/// A tensor on its way.
pub(super) struct PendingTensor {
    /// `None` where the tensor is here already.
    handle: Option<Box<dyn Pending>>,
    _sent: Tensor,
    received: Tensor,
}

impl PendingTensor {
    fn here(received: Tensor) -> Self {
        Self {
            handle: None,
            _sent: received.shallow_clone(),
            received,
        }
    }

    pub(super) fn wait(self) -> Result<Tensor, CommError> {
        self.handle.map_or(Ok(()), Pending::wait)?;
        Ok(self.received)
    }
}

/// The numbers of a contiguous tensor.
fn memory(tensor: &Tensor) -> Memory {
    let element = match tensor.kind() {
        Kind::Float => Element::F32,
        Kind::Double => Element::F64,
        Kind::BFloat16 => Element::Bf16,
        Kind::Int64 => Element::I64,
        kind => unreachable!("tensors of {kind:?} do not travel"),
    };
    debug_assert!(tensor.is_contiguous());
    Memory {
        address: tensor.data_ptr(),
        count: tensor.numel(),
        element,
    }
}

impl TensorGroup {
    /// This rank's place in the group.
    pub(super) fn index(&self) -> usize {
        self.numbers.place()
    }

    /// Ranks of the group.
    pub(super) fn ranks(&self) -> usize {
        self.numbers.size()
    }

    /// Starts to gather `[n]` of every rank into `[ranks, n]`. A rank alone gets its own tensor, not a copy.
    pub(super) fn start_gather(&self, phase: &str, own: &Tensor) -> Result<PendingTensor, CommError> {
        let own = own.detach().contiguous();
        let Some(tensors) = &self.tensors else {
            return Ok(PendingTensor::here(own.view([1, -1])));
        };
        let received = Tensor::empty(
            [self.ranks() as i64, own.numel() as i64],
            (own.kind(), own.device()),
        );
        // SAFETY: both tensors are contiguous, stay in the handle, and nobody else has the second one.
        let handle = unsafe { tensors.all_gather(phase, memory(&own), memory(&received)) }?;
        Ok(PendingTensor {
            handle: Some(handle),
            _sent: own,
            received,
        })
    }

    /// Starts to sum `[ranks, n]` over the ranks; each gets its row `[n]`, a rank alone that of its own tensor.
    pub(super) fn start_reduce(&self, phase: &str, all: &Tensor) -> Result<PendingTensor, CommError> {
        let all = all.detach().contiguous();
        let Some(tensors) = &self.tensors else {
            return Ok(PendingTensor::here(all.view([-1])));
        };
        let received = Tensor::empty([all.size()[1]], (all.kind(), all.device()));
        // SAFETY: as in `start_gather`.
        let handle = unsafe { tensors.reduce_scatter(phase, memory(&all), memory(&received)) }?;
        Ok(PendingTensor {
            handle: Some(handle),
            _sent: all,
            received,
        })
    }

    /// Sums numbers over the ranks, in place.
    pub(super) fn sum(&self, phase: &str, values: &mut [f64]) -> Result<(), CommError> {
        // SAFETY: the slice is borrowed until the operation has ended.
        unsafe { self.numbers.all_reduce(phase, Memory::of_f64(values)) }?.wait()
    }

    /// The numbers of every rank, `lengths[place]` each.
    pub(super) fn gather_numbers(
        &self,
        phase: &str,
        own: &[f64],
        lengths: &[usize],
    ) -> Result<Vec<Vec<f64>>, CommError> {
        // Every rank sends its numbers to each.
        let mut send: Vec<f64> = own.repeat(self.ranks());
        let mut received = vec![0.0; lengths.iter().sum()];
        // SAFETY: both live until the operation has ended.
        unsafe {
            self.numbers.all_to_all(
                phase,
                Memory::of_f64(&mut send),
                &vec![own.len(); self.ranks()],
                Memory::of_f64(&mut received),
                lengths,
            )
        }?
        .wait()?;
        let mut rest = &received[..];
        let cut = lengths.iter().map(|length| {
            let (head, tail) = rest.split_at(*length);
            rest = tail;
            head.to_vec()
        });
        Ok(cut.collect())
    }

    fn failed(&self) -> bool {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    fn fail(&self, error: CommError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
    }

    fn exchange_rows(&self, x: &Tensor, send: &[i64], receive: &[i64]) -> Result<Tensor, CommError> {
        let Some(tensors) = &self.tensors else {
            return Ok(x.shallow_clone());
        };
        let width: i64 = x.size()[1..].iter().product();
        let numbers = |rows: &[i64]| -> Vec<usize> { rows.iter().map(|r| (r * width) as usize).collect() };
        let mut size = x.size();
        size[0] = receive.iter().sum();
        let received = Tensor::empty(&size[..], (x.kind(), x.device()));
        // SAFETY: `x` is contiguous and borrowed, `received` is nobody else's, until the operation has ended.
        unsafe {
            tensors.all_to_all(
                "exchange of a layer",
                memory(x),
                &numbers(send),
                memory(&received),
                &numbers(receive),
            )
        }?
        .wait()?;
        Ok(received)
    }

    fn exchange_counts(&self, send: &[i64]) -> Result<Vec<i64>, CommError> {
        let mut send = send.to_vec();
        let mut received = vec![0; send.len()];
        let each = vec![send.len() / self.ranks(); self.ranks()];
        // SAFETY: both live until the operation has ended.
        unsafe {
            self.numbers.all_to_all(
                "counts of a layer",
                Memory::of_i64(&mut send),
                &each,
                Memory::of_i64(&mut received),
                &each,
            )
        }?
        .wait()?;
        Ok(received)
    }
}

impl Exchange for TensorGroup {
    fn place(&self) -> i64 {
        self.index() as i64
    }

    fn size(&self) -> i64 {
        self.ranks() as i64
    }

    fn rows(&self, x: &Tensor, send: &[i64], receive: &[i64]) -> Tensor {
        if !self.failed() {
            match self.exchange_rows(x, send, receive) {
                Ok(received) => return received,
                Err(error) => self.fail(error),
            }
        }
        let mut size = x.size();
        size[0] = receive.iter().sum();
        Tensor::zeros(&size[..], (x.kind(), x.device()))
    }

    fn counts(&self, send: &[i64]) -> Vec<i64> {
        if !self.failed() {
            match self.exchange_counts(send) {
                Ok(received) => return received,
                Err(error) => self.fail(error),
            }
        }
        vec![0; send.len()]
    }
}
