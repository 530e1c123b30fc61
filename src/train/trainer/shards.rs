//! The parameters of a network, split over the ranks of a [`Mesh`] (Rajbhandari et al., 2020, "ZeRO"; Zhao et
//! al., 2023, "PyTorch FSDP").
//!
//! Every parameter is a row of numbers that is cut into as many equal shares as there are ranks, the last
//! one padded with zeros. A rank owns one share of each: it keeps the share, its gradient and its
//! optimizer moments, and nothing else between two uses. Parameters are used by *unit*: the embedding, each
//! block, the final norm with the head, the value head of a critic.
//!
//! ```text
//! forward    … gather unit i+1 ─┐ compute unit i, release it │ gather unit i+2 …
//! backward   … gather unit i-1 ─┐ compute unit i, release it, start to sum its gradients │ …
//! ```
//!
//! A unit is gathered while the one before it computes, and its gradients are summed while the next one
//! does. Invariant: of the gathered parameters at most two units exist at a time (with the graphs of all
//! blocks kept, all of them). Experts are split twice: by expert over the ranks that share them, and
//! these, as everything else, over the ranks that have the same ones.
//!
//! `held` counts the bytes of every unit that is coming or here, and of no other: a unit whose gathering failed, and
//! one that is released before it arrived, are away again.
//!
//! Without a mesh a share is the parameter itself, and gathering does nothing.

use super::{
    block_loop::Gradients,
    mesh::{Mesh, PendingTensor, TensorGroup},
    TrainError,
};
use crate::{
    base::{WeightError, WeightTensor},
    model::net::{weight_from_tensor, Policy},
    train::checkpoint::{PieceIndex, TensorPiece},
};
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ops::Range,
    sync::Arc,
};
use tch::{no_grad, Kind, Tensor};

/// Bytes that are copied at a time from a saved state.
const COPY_BYTES: usize = 1 << 20;

/// Bytes of this rank's part of a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardMemory {
    /// Of its shares; its gradients take as much, its two moments twice as much.
    pub shares: usize,
    /// Most that was gathered at the same time, without the shares.
    pub gathered_peak: usize,
    /// Largest unit of the network, gathered.
    pub largest_unit: usize,
}

/// A parameter and this rank's share of it.
struct Piece {
    name: String,
    /// What the network computes with; empty while it is away.
    parameter: Tensor,
    /// Its shape when it is here: of experts, this rank's.
    shape: Vec<i64>,
    /// Its shape on one rank.
    full: Vec<i64>,
    is_expert: bool,
    /// `[numbers of a share]`; without a mesh the parameter.
    share: Tensor,
}

impl Piece {
    fn numel(&self) -> i64 {
        self.shape.iter().product()
    }
}

enum Place {
    Away,
    /// One tensor for each kind of piece.
    Coming(Vec<(bool, PendingTensor)>),
    Here,
}

/// All parameters of a network.
pub(super) struct Shards {
    mesh: Option<Arc<Mesh>>,
    pieces: Vec<Piece>,
    /// Name and pieces.
    units: Vec<(String, Range<usize>)>,
    places: RefCell<Vec<Place>>,
    by_name: HashMap<String, usize>,
    held: Cell<usize>,
    memory: Cell<ShardMemory>,
}

/// Gradients of a unit on their way.
pub(super) struct PendingGradients {
    /// Place of the piece, its offset and length in the sum.
    pieces: Vec<(usize, i64, i64)>,
    sum: PendingTensor,
}

/// A parameter of a network, as it is given to [`Shards::new`].
pub(super) struct Given {
    pub name: String,
    pub parameter: Tensor,
    /// Its shape on one rank.
    pub full: Vec<i64>,
    /// The parameter holds this rank's share already.
    pub is_share: bool,
}

impl Given {
    /// A parameter that is here.
    pub(super) fn whole(name: &str, parameter: &Tensor) -> Self {
        Self {
            name: name.to_owned(),
            full: parameter.size(),
            parameter: parameter.shallow_clone(),
            is_share: false,
        }
    }
}

/// The units of a policy in the order of use: embedding, blocks, final norm and head.
pub(super) fn units_of(policy: &Policy, with_head: bool) -> Vec<(String, Vec<Given>)> {
    let head = policy.config.head_spec().map(|spec| spec.name);
    let given = |((name, parameter), full)| Given {
        name,
        parameter,
        full,
        is_share: policy.is_partial(),
    };
    let mut rest: Vec<Given> = policy
        .parameters()
        .into_iter()
        .zip(policy.shapes())
        .map(given)
        .collect();
    let embedding = rest.remove(0);
    let mut units = vec![("embedding".to_owned(), vec![embedding])];
    for block in policy.blocks() {
        let parameters = rest.drain(..block.parameters().len()).collect();
        units.push((block.name().to_owned(), parameters));
    }
    rest.retain(|given| with_head || Some(&given.name) != head.as_ref());
    units.push(("final norm and head".to_owned(), rest));
    units
}

impl Shards {
    /// The embedding's unit. Blocks follow.
    pub(super) const EMBEDDING: usize = 0;

    /// Takes over the parameters of a network; with a mesh they are away from then on.
    pub(super) fn new(units: Vec<(String, Vec<Given>)>, mesh: Option<Arc<Mesh>>) -> Self {
        let mut pieces = Vec::new();
        let mut ranges = Vec::new();
        for (unit, parameters) in units {
            let first = pieces.len();
            pieces.extend(parameters.into_iter().map(|given| piece(given, mesh.as_deref())));
            ranges.push((unit, first..pieces.len()));
        }
        let place = |_: &_| match mesh {
            Some(_) => Place::Away,
            None => Place::Here,
        };
        let shards = Self {
            places: RefCell::new(ranges.iter().map(place).collect()),
            by_name: pieces
                .iter()
                .enumerate()
                .map(|(i, piece)| (piece.name.clone(), i))
                .collect(),
            pieces,
            units: ranges,
            mesh,
            held: Cell::new(0),
            memory: Cell::default(),
        };
        let bytes = |t: &Tensor| t.numel() * t.kind().elt_size_in_bytes();
        shards.memory.set(ShardMemory {
            shares: shards.pieces.iter().map(|piece| bytes(&piece.share)).sum(),
            gathered_peak: 0,
            largest_unit: (0..shards.units.len())
                .map(|unit| shards.unit_bytes(unit))
                .max()
                .unwrap_or(0),
        });
        shards
    }

    /// The mesh, where there are several ranks.
    pub(super) fn mesh(&self) -> Option<&Mesh> {
        self.mesh.as_deref()
    }

    /// Unit of the final norm and the head of a network with so many blocks.
    pub(super) fn last(blocks: usize) -> usize {
        blocks + 1
    }

    /// What the optimizer updates: name, share, and whether it is a matrix.
    pub(super) fn trained(&self) -> Vec<(String, Tensor, bool)> {
        let of = |piece: &Piece| {
            (
                piece.name.clone(),
                piece.share.shallow_clone(),
                piece.full.len() >= 2,
            )
        };
        self.pieces.iter().map(of).collect()
    }

    /// Gradients of zero.
    pub(super) fn zero_gradients(&self) -> Gradients {
        Gradients::zeros(
            self.pieces
                .iter()
                .map(|piece| (piece.name.clone(), piece.share.shallow_clone()))
                .collect(),
        )
    }

    pub(super) fn memory(&self) -> ShardMemory {
        self.memory.get()
    }

    /// Bytes of a unit's parameters when they are here.
    fn unit_bytes(&self, unit: usize) -> usize {
        let pieces = &self.pieces[self.units[unit].1.clone()];
        let bytes = |piece: &Piece| piece.numel() as usize * piece.share.kind().elt_size_in_bytes();
        pieces.iter().map(bytes).sum()
    }

    fn hold(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
        let mut memory = self.memory.get();
        memory.gathered_peak = memory.gathered_peak.max(self.held.get());
        self.memory.set(memory);
    }

    /// Starts to gather a unit, if it is neither here nor on its way. Past the last unit nothing happens.
    pub(super) fn prefetch(&self, unit: usize) -> Result<(), TrainError> {
        let Some(mesh) = &self.mesh else {
            return Ok(());
        };
        let mut places = self.places.borrow_mut();
        let Some(place @ Place::Away) = places.get_mut(unit) else {
            return Ok(());
        };
        let mut coming = Vec::new();
        for is_expert in [false, true] {
            let shares: Vec<Tensor> = self
                .members(unit, is_expert)
                .map(|i| self.pieces[i].share.shallow_clone())
                .collect();
            if !shares.is_empty() {
                let own = Tensor::cat(&shares, 0);
                let pending = group(mesh, is_expert).start_gather(&self.units[unit].0, &own)?;
                coming.push((is_expert, pending));
            }
        }
        *place = Place::Coming(coming);
        drop(places);
        self.hold(self.unit_bytes(unit));
        Ok(())
    }

    /// Gathers a unit, so that the network can compute with it. After an error the unit is away.
    pub(super) fn load(&self, unit: usize) -> Result<(), TrainError> {
        self.prefetch(unit)?;
        let mut places = self.places.borrow_mut();
        match std::mem::replace(&mut places[unit], Place::Here) {
            Place::Coming(coming) => {
                drop(places);
                let arrived = self.arrive(unit, coming);
                if arrived.is_err() {
                    self.release(unit);
                }
                arrived
            }
            Place::Here | Place::Away => Ok(()),
        }
    }

    /// Waits for a unit and gives its numbers to the network.
    fn arrive(&self, unit: usize, coming: Vec<(bool, PendingTensor)>) -> Result<(), TrainError> {
        for (is_expert, pending) in coming {
            let rows = pending.wait()?;
            let mut at = 0;
            for i in self.members(unit, is_expert) {
                let piece = &self.pieces[i];
                let share = piece.share.numel() as i64;
                let whole = rows.narrow(1, at, share).reshape([-1]);
                let value = whole.narrow(0, 0, piece.numel()).view(&piece.shape[..]);
                piece.parameter.shallow_clone().set_data(&value);
                at += share;
            }
        }
        Ok(())
    }

    /// Gives the memory of a unit's parameters back. Of one that is on its way the result is not waited for: all
    /// ranks release alike, and each rank's part has been sent.
    pub(super) fn release(&self, unit: usize) {
        if self.mesh.is_none() {
            return;
        }
        let place = std::mem::replace(&mut self.places.borrow_mut()[unit], Place::Away);
        if matches!(place, Place::Here) {
            for piece in &self.pieces[self.units[unit].1.clone()] {
                send_away(&piece.parameter);
            }
        }
        if !matches!(place, Place::Away) {
            self.held.set(self.held.get() - self.unit_bytes(unit));
        }
    }

    /// Bytes of the units that are coming or here.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.held.get()
    }

    fn members(&self, unit: usize, is_expert: bool) -> impl Iterator<Item = usize> + '_ {
        let range = self.units[unit].1.clone();
        range.filter(move |i| self.pieces[*i].is_expert == is_expert)
    }

    /// Adds gradients of some parameters of a unit, summed over the ranks; undefined ones are zero. The sum
    /// arrives later: at the next call, or in [`Shards::finish`].
    pub(super) fn add_gradients(
        &self,
        unit: usize,
        found: &[(&str, Tensor)],
        gradients: &mut Gradients,
    ) -> Result<(), TrainError> {
        let Some(mesh) = &self.mesh else {
            for (name, gradient) in found {
                gradients.add(name, gradient);
            }
            return Ok(());
        };
        let mut started = Vec::new();
        for is_expert in [false, true] {
            let group = group(mesh, is_expert);
            let ranks = group.ranks() as i64;
            let (mut rows, mut pieces) = (Vec::new(), Vec::new());
            let mut at = 0;
            for (name, gradient) in found {
                let place = self.by_name[*name];
                let piece = &self.pieces[place];
                if piece.is_expert != is_expert {
                    continue;
                }
                let share = piece.share.numel() as i64;
                let flat = if gradient.defined() {
                    gradient.to_kind(piece.share.kind()).reshape([-1])
                } else {
                    Tensor::zeros([piece.numel()], (piece.share.kind(), piece.share.device()))
                };
                let padded = flat.constant_pad_nd([0, share * ranks - piece.numel()]);
                rows.push(padded.view([ranks, share]));
                pieces.push((place, at, share));
                at += share;
            }
            if !rows.is_empty() {
                let sum = group.start_reduce(&self.units[unit].0, &Tensor::cat(&rows, 1))?;
                started.push(PendingGradients { pieces, sum });
            }
        }
        self.finish(gradients)?;
        gradients.pending = started;
        Ok(())
    }

    /// Waits for the gradients that are on their way.
    pub(super) fn finish(&self, gradients: &mut Gradients) -> Result<(), TrainError> {
        for pending in std::mem::take(&mut gradients.pending) {
            let sum = pending.sum.wait()?;
            for (place, at, share) in pending.pieces {
                let _ = gradients.tensors[place].g_add_(&sum.narrow(0, at, share));
            }
        }
        Ok(())
    }

    /// Norm of the gradients of all parameters, on all ranks.
    pub(super) fn global_norm(&self, gradients: &Gradients) -> Result<f64, TrainError> {
        let mut square = [gradients.square()];
        if let Some(mesh) = &self.mesh {
            mesh.all.sum("norm of the gradients", &mut square)?;
        }
        Ok(square[0].sqrt())
    }

    /// Copies of tensors that are shared as the parameters are, whole, under `prefix` and the name.
    pub(super) fn export(&self, prefix: &str, shares: &[Tensor]) -> Result<Vec<WeightTensor>, TrainError> {
        let one = |(piece, share): (&Piece, &Tensor)| -> Result<WeightTensor, TrainError> {
            let name = format!("{prefix}{}", piece.name);
            Ok(weight_from_tensor(&name, &self.whole(piece, share)?))
        };
        self.pieces.iter().zip(shares).map(one).collect()
    }

    /// This rank's part of an export that another rank keeps: nothing whole stays here.
    pub(super) fn assist_export(&self, shares: &[Tensor]) -> Result<(), TrainError> {
        let mut pairs = self.pieces.iter().zip(shares);
        pairs.try_for_each(|(piece, share)| self.whole(piece, share).map(drop))
    }

    /// This rank's shares of all parameters.
    pub(super) fn shares(&self) -> Vec<Tensor> {
        self.pieces.iter().map(|p| p.share.shallow_clone()).collect()
    }

    /// Copies of the parameters, whole, in checkpoint order.
    pub(super) fn export_parameters(&self) -> Result<Vec<WeightTensor>, TrainError> {
        self.export("", &self.shares())
    }

    /// Whole tensors that are shared as the parameters are.
    #[cfg(test)]
    pub(super) fn whole_tensors(&self, shares: &[Tensor]) -> Result<Vec<Tensor>, TrainError> {
        let pairs = self.pieces.iter().zip(shares);
        pairs.map(|(piece, share)| self.whole(piece, share)).collect()
    }

    fn whole(&self, piece: &Piece, share: &Tensor) -> Result<Tensor, TrainError> {
        let Some(mesh) = &self.mesh else {
            return Ok(share.shallow_clone());
        };
        let rows = mesh.all.start_gather(&piece.name, share)?.wait()?;
        if !piece.is_expert {
            let whole = rows.view([-1]).narrow(0, 0, piece.numel());
            return Ok(whole.view(&piece.full[..]));
        }
        // Rank r has the experts r mod e and their share r / e.
        let experts = mesh.experts.ranks() as i64;
        let by_experts = rows.view([-1, experts, share.numel() as i64]).transpose(0, 1);
        let padded = by_experts.reshape([experts, -1]);
        Ok(padded.narrow(1, 0, piece.numel()).reshape(&piece.full[..]))
    }

    /// Copies of what this rank owns of tensors that are shared as the parameters are, in host memory, under
    /// `prefix` and the name. The other ranks have the rest; a share of nothing is left out.
    pub(super) fn snapshot(&self, prefix: &str, shares: &[Tensor]) -> Vec<TensorPiece> {
        let one = |(piece, share): (&Piece, &Tensor)| {
            let own = self.own_range(piece);
            let count = own.len() as i64;
            let numbers = share.reshape([-1]).narrow(0, 0, count);
            (count > 0).then(|| TensorPiece {
                name: format!("{prefix}{}", piece.name),
                shape: piece.full.iter().map(|n| *n as usize).collect(),
                offset: own.start,
                data: weight_from_tensor(&piece.name, &numbers).data,
            })
        };
        self.pieces.iter().zip(shares).filter_map(one).collect()
    }

    /// Places of the numbers that this rank owns in the whole tensor.
    fn own_range(&self, piece: &Piece) -> Range<usize> {
        match &self.mesh {
            None => 0..piece.numel() as usize,
            Some(mesh) => own_range(&piece.shape, piece.is_expert, mesh),
        }
    }

    /// Whether saved tensors are those of the parameters, by name and shape.
    pub(super) fn check(&self, prefix: &str, saved: &PieceIndex<'_>) -> Result<(), WeightError> {
        let refuse = |name: &str, problem: String| {
            Err(WeightError::Tensor {
                name: format!("{prefix}{name}"),
                problem,
            })
        };
        for name in saved.names().filter_map(|name| name.strip_prefix(prefix)) {
            if !self.by_name.contains_key(name) {
                return refuse(name, "the policy has no such tensor".into());
            }
        }
        for piece in &self.pieces {
            let Some(shape) = saved.shape(&format!("{prefix}{}", piece.name)) else {
                return refuse(&piece.name, "the saved state does not have it".into());
            };
            if !shape.iter().map(|n| *n as i64).eq(piece.full.iter().copied()) {
                let problem = format!("shape {shape:?} was saved, shape {:?} is wanted", piece.full);
                return refuse(&piece.name, problem);
            }
        }
        Ok(())
    }

    /// Gives this rank's shares the numbers of saved tensors that [`Shards::check`] found to fit. They are copied
    /// from where they lie in pieces of [`COPY_BYTES`]; padding behind a share's last number stays zero.
    pub(super) fn fill(&self, prefix: &str, saved: &PieceIndex<'_>, shares: &[Tensor]) {
        for (piece, share) in self.pieces.iter().zip(shares) {
            let flat = share.detach().view([-1]);
            let name = format!("{prefix}{}", piece.name);
            let runs = saved.bytes(&name, self.own_range(piece));
            let mut at = 0;
            for bytes in runs.flat_map(|run| run.chunks(COPY_BYTES)) {
                let count = (bytes.len() / size_of::<f32>()) as i64;
                let numbers = Tensor::from_data_size(bytes, &[count], Kind::Float);
                no_grad(|| flat.narrow(0, at, count).copy_(&numbers));
                at += count;
            }
        }
    }

    /// Sets the parameters to saved ones that fit.
    pub(super) fn set_parameters(&self, saved: &PieceIndex<'_>) {
        self.fill("", saved, &self.shares());
        if self.mesh.is_some() {
            (0..self.units.len()).for_each(|unit| self.release(unit));
        }
    }
}

fn group(mesh: &Mesh, is_expert: bool) -> &TensorGroup {
    if is_expert {
        &mesh.replicas
    } else {
        &mesh.all
    }
}

fn piece(given: Given, mesh: Option<&Mesh>) -> Piece {
    let Given {
        name,
        parameter,
        full,
        is_share,
    } = given;
    let Some(mesh) = mesh else {
        return Piece {
            share: parameter.shallow_clone(),
            shape: full.clone(),
            full,
            name,
            parameter,
            is_expert: false,
        };
    };
    let is_expert = is_shared_expert(&name, mesh);
    let shape = gathered_shape(&full, is_expert, mesh);
    // What set_data replaces lives on in the share.
    let share = match is_share {
        true => parameter.detach(),
        false => own_share(&parameter.detach(), &shape, is_expert, mesh),
    };
    send_away(&parameter);
    Piece {
        name,
        parameter,
        shape,
        full,
        is_expert,
        share,
    }
}

/// Whether a parameter is spread by expert.
fn is_shared_expert(name: &str, mesh: &Mesh) -> bool {
    name.contains(".mlp.experts.") && mesh.experts.ranks() > 1
}

/// Shape of what a rank gathers.
fn gathered_shape(full: &[i64], is_expert: bool, mesh: &Mesh) -> Vec<i64> {
    let mut shape = full.to_vec();
    if is_expert {
        shape[0] /= mesh.experts.ranks() as i64;
    }
    shape
}

impl Mesh {
    /// This rank's share of a parameter, for [`Policy::load_parts`]: the whole is then never in memory.
    pub fn share(&self, name: &str, whole: &Tensor) -> Tensor {
        let is_expert = is_shared_expert(name, self);
        let shape = gathered_shape(&whole.size(), is_expert, self);
        own_share(whole, &shape, is_expert, self)
    }
}

/// Places of the numbers that this rank owns in a whole tensor; `shape` is that of the part that is gathered.
/// They are one run: experts are cut along the first axis.
fn own_range(shape: &[i64], is_expert: bool, mesh: &Mesh) -> Range<usize> {
    let part = shape.iter().product::<i64>() as usize;
    let group = group(mesh, is_expert);
    let first = if is_expert { mesh.experts.index() * part } else { 0 };
    let share = part.div_ceil(group.ranks());
    let start = (group.index() * share).min(part);
    first + start..first + (start + share).min(part)
}

/// This rank's share of a whole tensor; `shape` is that of the part that is gathered.
fn own_share(whole: &Tensor, shape: &[i64], is_expert: bool, mesh: &Mesh) -> Tensor {
    let own = own_range(shape, is_expert, mesh);
    let part = shape.iter().product::<i64>() as usize;
    let share = part.div_ceil(group(mesh, is_expert).ranks());
    // A copy of its own, or the whole tensor would stay in memory.
    whole
        .reshape([-1])
        .narrow(0, own.start as i64, own.len() as i64)
        .constant_pad_nd([0, (share - own.len()) as i64])
        .copy()
}

/// Leaves the parameter without numbers.
fn send_away(parameter: &Tensor) {
    let nothing = Tensor::empty([0], (parameter.kind(), parameter.device()));
    parameter.shallow_clone().set_data(&nothing);
}
