//! Where the segments of a packed row start, what follows from it, and the routing of its tokens.

use super::{delta_rule::ChunkGrid, exchange::Exchanges};
use crate::model::hf::Rope;
use std::{
    cell::{OnceCell, RefCell},
    ops::Range,
    rc::Rc,
};
use tch::{Device, Kind, Tensor};

/// Experts of the tokens of one sparse layer.
pub struct Routing {
    /// `[T,k]` i64, the most likely first where they were chosen freely.
    pub experts: Tensor,
    /// `[T,k]`: what each expert's output is multiplied by.
    pub weights: Tensor,
}

impl Routing {
    fn shallow_clone(&self) -> Self {
        Self {
            experts: self.experts.shallow_clone(),
            weights: self.weights.shallow_clone(),
        }
    }
}

/// Keys and values of earlier tokens, for a network that computes a text piece by piece.
pub trait AttentionMemory {
    /// Called once an attending layer, in layer order: keeps `k` and `v [T,nkv,d]` of the tokens of the row
    /// and attends from `q [T,nq,d]` to all tokens of their sequences; `[T,nq,d]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor;
}

/// Segments of a packed row. Made once a micro-batch and used by every block.
pub struct PackedLayout {
    starts: Vec<i64>,
    device: Device,
    positions: Tensor,
    rope: RefCell<Option<RopeTable>>,
    grid: OnceCell<ChunkGrid>,
    starts_there: OnceCell<Tensor>,
    memory: Option<Rc<dyn AttentionMemory>>,
    replay: Vec<Tensor>,
    record: RefCell<Option<Vec<Routing>>>,
    pub(super) exchanges: Exchanges,
}

struct RopeTable {
    rope: Rope,
    kind: Kind,
    cos: Tensor,
    sin: Tensor,
}

impl PackedLayout {
    /// A row of segments with these lengths, in order. Segments of length 0 are allowed and hold nothing.
    pub fn new(lengths: &[usize], device: Device) -> Self {
        let mut starts = vec![0i64];
        let mut positions = Vec::with_capacity(lengths.iter().sum());
        let mut at = 0;
        for &n in lengths {
            at += n as i64;
            starts.push(at);
            positions.extend(0..n as i64);
        }
        Self {
            starts,
            device,
            positions: Tensor::from_slice(&positions).to_device(device),
            rope: RefCell::new(None),
            grid: OnceCell::new(),
            starts_there: OnceCell::new(),
            memory: None,
            replay: Vec::new(),
            record: RefCell::new(None),
            exchanges: Exchanges::default(),
        }
    }

    /// One segment.
    pub fn single(length: usize, device: Device) -> Self {
        Self::new(&[length], device)
    }

    /// Tokens with these positions `[T]` i64, whose attention is the business of `memory`. A delta net
    /// takes them for one segment from its start.
    pub fn over_memory(positions: Tensor, memory: Rc<dyn AttentionMemory>) -> Self {
        let tokens = positions.size().first().map_or(0, |n| *n as usize);
        let device = positions.device();
        Self {
            starts: vec![0, tokens as i64],
            device,
            positions,
            rope: RefCell::new(None),
            grid: OnceCell::new(),
            starts_there: OnceCell::new(),
            memory: Some(memory),
            replay: Vec::new(),
            record: RefCell::new(None),
            exchanges: Exchanges::default(),
        }
    }

    pub(super) fn memory(&self) -> Option<&dyn AttentionMemory> {
        self.memory.as_deref()
    }

    /// Takes the experts from here instead of choosing them: one tensor `[T,k]` of integers a sparse
    /// layer, in layer order. Rows of -1 are chosen freely.
    pub fn with_replay(mut self, experts: Vec<Tensor>) -> Self {
        self.replay = experts;
        self
    }

    /// Keeps the routing of all sparse layers of the next forward pass for [`PackedLayout::recorded`].
    pub fn start_recording(&self) {
        *self.record.borrow_mut() = Some(Vec::new());
    }

    /// What was recorded, in layer order; recording ends.
    pub fn recorded(&self) -> Vec<Routing> {
        self.record.borrow_mut().take().unwrap_or_default()
    }

    /// Of this rank's tokens.
    pub(super) fn replay(&self, sparse_layer: usize) -> Option<Tensor> {
        let (start, count) = self.own_tokens();
        let of_row = self.replay.get(sparse_layer)?;
        Some(of_row.narrow(0, start, count))
    }

    pub(super) fn record(&self, routing: &Routing) {
        if let Some(list) = self.record.borrow_mut().as_mut() {
            list.push(routing.shallow_clone());
        }
    }

    /// Tokens of the row.
    pub fn num_tokens(&self) -> i64 {
        *self.starts.last().unwrap_or(&0)
    }

    /// Device of the tensors.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Token range of every segment.
    pub fn segments(&self) -> impl Iterator<Item = Range<i64>> + '_ {
        self.starts.windows(2).map(|w| w[0]..w[1])
    }

    /// Where the segments start, and where the last one ends, `[segments+1]` i32 on the device; and the
    /// length of the longest one.
    pub(super) fn starts(&self) -> (Tensor, i64) {
        let starts = self.starts_there.get_or_init(|| {
            let starts: Vec<i32> = self.starts.iter().map(|s| *s as i32).collect();
            Tensor::from_slice(&starts).to_device(self.device)
        });
        let longest = self.segments().map(|s| s.end - s.start).max();
        (starts.shallow_clone(), longest.unwrap_or(0))
    }

    /// Position of every token within its segment, `[T]` i64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Cosines and sines of the rotary angles, `[T, 1, dim]` each with the two halves repeated: f64 to turn
    /// what is f64, else f32. Computed once for all blocks that share the frequencies.
    pub fn rope(&self, rope: &Rope, turned: Kind) -> (Tensor, Tensor) {
        let kind = table_kind(turned);
        let mut slot = self.rope.borrow_mut();
        if let Some(table) = slot.as_ref().filter(|t| t.kind == kind && t.rope == *rope) {
            return (table.cos.shallow_clone(), table.sin.shallow_clone());
        }
        let (cos, sin) = match kind {
            Kind::Double => rope_table_f64(&self.positions, rope),
            _ => rope_table(&self.positions, rope),
        };
        let rope = rope.clone();
        let table = slot.insert(RopeTable { rope, kind, cos, sin });
        (table.cos.shallow_clone(), table.sin.shallow_clone())
    }

    /// The chunks that the delta rule cuts the segments into.
    pub(super) fn chunk_grid(&self) -> &ChunkGrid {
        self.grid
            .get_or_init(|| ChunkGrid::new(self.segments(), self.device))
    }
}

fn table_kind(turned: Kind) -> Kind {
    match turned {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Rotary table of the given positions `[T]`, cosines and sines times the attention factor: two `[T, 1, dim]` f32
/// tensors. Frequencies and angles are those of f32 programs.
pub(crate) fn rope_table(positions: &Tensor, rope: &Rope) -> (Tensor, Tensor) {
    // Frequencies in f64, then rounded: an angle is a position times a frequency, and multiplies its error.
    let frequencies: Vec<f32> = rope.frequencies().iter().map(|f| *f as f32).collect();
    let angles = angles(positions, &Tensor::from_slice(&frequencies));
    let factor = rope.attention_factor();
    if angles.device().is_cuda() {
        return (angles.cos() * factor, angles.sin() * factor);
    }
    // In f64, then rounded: in f32, 3 of 100 processes with 16 threads had tables that were 2^-11 off (supposed cause:
    // a low accuracy of MKL's vector functions in their first call by several threads); in f64, none of 209.
    let wide = angles.to_kind(Kind::Double);
    let narrow = |table: Tensor| (table * factor).to_kind(Kind::Float);
    (narrow(wide.cos()), narrow(wide.sin()))
}

/// The same in f64, nothing rounded on the way.
fn rope_table_f64(positions: &Tensor, rope: &Rope) -> (Tensor, Tensor) {
    let angles = angles(positions, &Tensor::from_slice(&rope.frequencies()));
    let factor = rope.attention_factor();
    (angles.cos() * factor, angles.sin() * factor)
}

/// `[T, 1, dim]`: positions times frequencies, twice side by side, in the element type of the frequencies.
fn angles(positions: &Tensor, frequencies: &Tensor) -> Tensor {
    let frequencies = frequencies.to_device(positions.device());
    let half = positions.to_kind(frequencies.kind()).unsqueeze(-1) * frequencies;
    Tensor::cat(&[&half, &half], -1).unsqueeze(1)
}

/// Rotates the first numbers of every head of `x [T, heads, d]` by a table of [`PackedLayout::rope`], in pairs
/// `(i, i + dim/2)` (the half-split pairing of GPT-NeoX); what lies behind the table's `dim` stays.
pub(super) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let (dim, width) = (cos.size()[2], x.size()[2]);
    let (cos, sin) = (cos.to_kind(x.kind()), sin.to_kind(x.kind()));
    let turn = |x: &Tensor| {
        let halves = x.chunk(2, -1);
        let swapped = Tensor::cat(&[-&halves[1], halves[0].shallow_clone()], -1);
        x * &cos + swapped * &sin
    };
    if dim == width {
        return turn(x);
    }
    let parts = x.split_with_sizes([dim, width - dim], -1);
    Tensor::cat(&[turn(&parts[0]), parts[1].shallow_clone()], -1)
}
