//! Where the segments of a packed row start, and what follows from it.

use std::{cell::RefCell, ops::Range};
use tch::{Device, Kind, Tensor};

/// Segments of a packed row. Made once a micro-batch and used by every block.
pub struct PackedLayout {
    starts: Vec<i64>,
    device: Device,
    positions: Tensor,
    rope: RefCell<Option<RopeTable>>,
}

struct RopeTable {
    theta: f64,
    dim: i64,
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
        }
    }

    /// One segment.
    pub fn single(length: usize, device: Device) -> Self {
        Self::new(&[length], device)
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

    /// Position of every token within its segment, `[T]` i64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Cosines and sines of the rotary angles, `[T, 1, dim]` f32 each with the two halves repeated.
    /// Frequency i is `theta^(-2i/dim)` (Su et al., 2021, with the half-split pairing of GPT-NeoX).
    /// Computed once for all blocks that share `theta` and `dim`.
    pub fn rope(&self, theta: f64, dim: i64) -> (Tensor, Tensor) {
        let mut slot = self.rope.borrow_mut();
        if let Some(table) = slot.as_ref().filter(|t| t.theta == theta && t.dim == dim) {
            return (table.cos.shallow_clone(), table.sin.shallow_clone());
        }
        let (cos, sin) = rope_table(&self.positions, theta, dim);
        let table = slot.insert(RopeTable { theta, dim, cos, sin });
        (table.cos.shallow_clone(), table.sin.shallow_clone())
    }
}

/// Rotary table of the given positions `[T]`: two `[T, 1, dim]` f32 tensors.
pub(crate) fn rope_table(positions: &Tensor, theta: f64, dim: i64) -> (Tensor, Tensor) {
    // In f64, then rounded: an angle is a position times a frequency, and multiplies its error.
    let exponents = Tensor::arange(dim / 2, (Kind::Double, positions.device())) * (-2.0 / dim as f64);
    let frequencies = (exponents * theta.ln()).exp().to_kind(Kind::Float);
    let half = positions.to_kind(Kind::Float).unsqueeze(-1) * frequencies;
    let angles = Tensor::cat(&[&half, &half], -1).unsqueeze(1);
    (angles.cos(), angles.sin())
}

/// Rotates `x [T, heads, dim]` by a table of [`rope_table`].
pub(crate) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let halves = x.chunk(2, -1);
    let swapped = Tensor::cat(&[-&halves[1], halves[0].shallow_clone()], -1);
    x * cos + swapped * sin
}
