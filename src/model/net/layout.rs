//! Where the segments of a packed row start, what follows from it, and the routing of its tokens.

use super::{
    delta_rule::{ChunkGrid, PieceGrid},
    exchange::Exchanges,
};
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

/// What is kept of earlier tokens, for a network that computes texts piece by piece: the segments of the row are
/// pieces, each behind what is kept of its text.
pub trait TokenMemory {
    /// Called once an attending layer, in layer order: keeps `k` and `v [T,nkv,d]` of the tokens of the row
    /// and attends from `q [T,nq,d]` to all tokens of their texts; `[T,nq,d]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor;

    /// Called once a delta-net layer, in layer order: what it kept of the tokens before the pieces. The caller
    /// may overwrite the tensors.
    fn recall(&self) -> DeltaState;

    /// Called behind [`TokenMemory::recall`], for the same layer: what it keeps up to the ends of the pieces.
    fn keep(&self, state: DeltaState);
}

/// What a delta net keeps of texts.
pub struct DeltaState {
    /// `[segments,K-1,channels]`: the last inputs of the convolution, oldest first, zeros before the start of the
    /// text; in the element type of the residual stream.
    pub inputs: Tensor,
    /// `[segments,Hv,dk,dv]`: the state of the delta rule, zero before the first token; at least f32.
    pub state: Tensor,
}

/// Where the inputs of a convolution lie in `[kept inputs of all segments | rows of the tokens]`.
pub(super) struct TapRows {
    /// For 1, 2 … K−1 tokens back, the row of every token's input, `[T]` i64.
    pub back: Vec<Tensor>,
    /// Rows that are kept behind the pieces, `[segments·(K−1)]` i64.
    pub kept: Tensor,
}

impl TapRows {
    pub(super) fn new(segments: impl Iterator<Item = Range<i64>>, taps: i64, device: Device) -> Self {
        let segments: Vec<Range<i64>> = segments.collect();
        let before = taps - 1;
        let kept_rows = segments.len() as i64 * before;
        // Of the token `place` of a segment; negative places lie before the piece.
        let row = |number: usize, place: i64| match place {
            0.. => kept_rows + segments[number].start + place,
            _ => (number as i64 + 1) * before + place,
        };
        let lengths = || segments.iter().map(|s| s.end - s.start).enumerate();
        let mut rows = Vec::new();
        for back in 1..taps {
            rows.extend(lengths().flat_map(|(s, n)| (0..n).map(move |place| (s, place - back))));
        }
        rows.extend(lengths().flat_map(|(s, n)| (n - before..n).map(move |place| (s, place))));
        let rows: Vec<i64> = rows.into_iter().map(|(s, place)| row(s, place)).collect();
        let tokens = segments.last().map_or(0, |s| s.end);
        let mut sizes = vec![tokens; before as usize];
        sizes.push(kept_rows);
        let mut back = Tensor::from_slice(&rows)
            .to_device(device)
            .split_with_sizes(&sizes[..], 0);
        let kept = back.swap_remove(before as usize);
        Self { back, kept }
    }
}

/// Segments of a packed row. Made once a micro-batch and used by every block.
pub struct PackedLayout {
    starts: Vec<i64>,
    device: Device,
    positions: Tensor,
    rope: RefCell<Option<RopeTable>>,
    grid: OnceCell<ChunkGrid>,
    piece_grid: OnceCell<PieceGrid>,
    taps: OnceCell<TapRows>,
    starts_there: OnceCell<Tensor>,
    memory: Option<Rc<dyn TokenMemory>>,
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
        let positions: Vec<i64> = lengths.iter().flat_map(|n| 0..*n as i64).collect();
        Self::with(lengths, Tensor::from_slice(&positions).to_device(device), None)
    }

    /// One segment.
    pub fn single(length: usize, device: Device) -> Self {
        Self::new(&[length], device)
    }

    /// Pieces of texts with these lengths, none of them 0, whose tokens have these positions `[T]` i64 in their
    /// texts; what is before them is in `memory`.
    pub fn over_memory(lengths: &[usize], positions: Tensor, memory: Rc<dyn TokenMemory>) -> Self {
        Self::with(lengths, positions, Some(memory))
    }

    fn with(lengths: &[usize], positions: Tensor, memory: Option<Rc<dyn TokenMemory>>) -> Self {
        let mut starts = vec![0i64];
        let mut at = 0;
        for n in lengths {
            at += *n as i64;
            starts.push(at);
        }
        Self {
            starts,
            device: positions.device(),
            positions,
            rope: RefCell::new(None),
            grid: OnceCell::new(),
            piece_grid: OnceCell::new(),
            taps: OnceCell::new(),
            starts_there: OnceCell::new(),
            memory,
            replay: Vec::new(),
            record: RefCell::new(None),
            exchanges: Exchanges::default(),
        }
    }

    pub(super) fn memory(&self) -> Option<&dyn TokenMemory> {
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

    /// How the delta rule goes through pieces.
    pub(super) fn piece_grid(&self) -> &PieceGrid {
        self.piece_grid
            .get_or_init(|| PieceGrid::new(self.segments(), self.device))
    }

    /// Inputs of the convolutions over pieces. All layers have the same number of taps.
    pub(super) fn tap_rows(&self, taps: i64) -> &TapRows {
        self.taps
            .get_or_init(|| TapRows::new(self.segments(), taps, self.device))
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
    // An angle is a position times a frequency, and multiplies its error.
    let angles = angles(positions, &Tensor::from_slice(&rope.frequencies_f32()));
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
