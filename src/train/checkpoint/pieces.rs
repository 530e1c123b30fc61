//! Tensors in pieces: what each rank owns of them.
//!
//! A piece is a run of numbers of one tensor, read row by row. A rank's share of a parameter is one run
//! (`train/trainer/shards`), so a tensor over n ranks is n pieces, and a tensor that one rank has whole is
//! one. [`PieceIndex`] puts the pieces of all ranks side by side: whoever wants some numbers of a tensor, a
//! rank its share on another number of ranks or the export a whole tensor, gets the parts of the pieces that
//! hold them. Nothing is put together in memory; pieces of a checkpoint are slices of memory maps.

use crate::base::WeightError;
use bytes::Bytes;
use std::{collections::HashMap, ops::Range};

/// Bytes of a number: checkpoints are in f32.
pub(super) const NUMBER_BYTES: usize = 4;

/// A run of numbers of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPiece {
    /// Checkpoint name; moments have a prefix before it.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Place of the first number in the whole tensor, row by row.
    pub offset: usize,
    /// f32, little-endian.
    pub data: Bytes,
}

impl TensorPiece {
    /// Places of its numbers in the whole tensor.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.data.len() / NUMBER_BYTES
    }

    /// Numbers of the whole tensor.
    pub fn whole_numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The piece is the tensor.
    pub fn is_whole(&self) -> bool {
        self.range() == (0..self.whole_numel())
    }
}

/// The pieces of some tensors, each of them complete.
pub struct PieceIndex<'a> {
    tensors: HashMap<&'a str, Vec<&'a TensorPiece>>,
}

impl<'a> PieceIndex<'a> {
    /// Sorts the pieces of all ranks by tensor.
    ///
    /// # Errors
    /// A tensor of which numbers are missing or there twice, or whose pieces disagree about its shape.
    pub fn new(pieces: &'a [TensorPiece]) -> Result<Self, WeightError> {
        let mut tensors: HashMap<&str, Vec<&TensorPiece>> = HashMap::new();
        for piece in pieces {
            tensors.entry(&piece.name).or_default().push(piece);
        }
        for (name, pieces) in &mut tensors {
            pieces.sort_by_key(|piece| (piece.offset, piece.data.len()));
            if let Some(problem) = problem_of(pieces) {
                return Err(WeightError::Tensor {
                    name: (*name).to_owned(),
                    problem,
                });
            }
        }
        Ok(Self { tensors })
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.tensors.keys().copied()
    }

    /// Shape of a tensor; `None` when there is no such tensor.
    pub fn shape(&self, name: &str) -> Option<&'a [usize]> {
        let first = *self.tensors.get(name)?.first()?;
        Some(&first.shape)
    }

    /// The bytes of these numbers of a tensor, in order, as they lie in the pieces. Nothing comes of a tensor
    /// that is not there, nor of numbers behind its end.
    pub fn bytes(&self, name: &str, wanted: Range<usize>) -> impl Iterator<Item = &'a [u8]> {
        let pieces = self.tensors.get(name).cloned().unwrap_or_default();
        pieces.into_iter().filter_map(move |piece| {
            let has = piece.range();
            let (start, end) = (wanted.start.max(has.start), wanted.end.min(has.end));
            let at = |place: usize| (place - has.start) * NUMBER_BYTES;
            (start < end).then(|| &piece.data[at(start)..at(end)])
        })
    }
}

/// What is wrong with the pieces of one tensor, which are sorted by their place.
fn problem_of(pieces: &[&TensorPiece]) -> Option<String> {
    let first = pieces.first()?;
    if let Some(other) = pieces.iter().find(|piece| piece.shape != first.shape) {
        return Some(format!(
            "one rank wrote it as part of shape {:?}, another as part of {:?}",
            first.shape, other.shape
        ));
    }
    let all = first.whole_numel();
    let mut end = 0;
    for range in pieces.iter().map(|piece| piece.range()) {
        if range.start < end {
            return Some(format!("number {} of it was written by two ranks", range.start));
        }
        if range.start > end {
            return Some(missing(end..range.start, all));
        }
        end = range.end;
    }
    match end {
        end if end < all => Some(missing(end..all, all)),
        end if end > all => Some(format!(
            "it has {all} numbers (shape {:?}) and a piece ends at {end}",
            first.shape
        )),
        _ => None,
    }
}

fn missing(range: Range<usize>, all: usize) -> String {
    format!(
        "of its {all} numbers those from {} to {} were written by no rank",
        range.start,
        range.end - 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: usize, values: &[f32]) -> TensorPiece {
        TensorPiece {
            name: "w".into(),
            shape: vec![2, 5],
            offset,
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    #[test]
    fn any_run_comes_out_of_any_pieces() {
        let all: Vec<f32> = (0..10).map(|n| n as f32).collect();
        for cuts in [vec![0, 10], vec![0, 4, 10], vec![0, 1, 2, 9, 10]] {
            let mut pieces: Vec<_> = cuts.windows(2).map(|c| piece(c[0], &all[c[0]..c[1]])).collect();
            pieces.reverse();
            let index = PieceIndex::new(&pieces).unwrap();
            assert_eq!(index.shape("w"), Some(&[2, 5][..]));
            for start in 0..10 {
                for end in start..=10 {
                    let bytes: Vec<u8> = index.bytes("w", start..end).flatten().copied().collect();
                    let want: Vec<u8> = all[start..end].iter().flat_map(|v| v.to_le_bytes()).collect();
                    assert_eq!(bytes, want, "{cuts:?} {start}..{end}");
                }
            }
            assert_eq!(index.bytes("v", 0..3).count(), 0);
            assert_eq!(index.shape("v"), None);
        }
    }

    #[test]
    fn holes_and_overlaps_are_named() {
        let problem = |pieces: &[TensorPiece]| PieceIndex::new(pieces).err().unwrap().to_string();
        let (head, tail) = (piece(0, &[0.0; 4]), piece(4, &[0.0; 6]));
        assert!(PieceIndex::new(&[tail.clone(), head.clone()]).is_ok());
        assert!(problem(std::slice::from_ref(&tail)).contains("`w`: of its 10 numbers those from 0 to 3"));
        assert!(problem(std::slice::from_ref(&head)).contains("those from 4 to 9"));
        assert!(problem(&[head.clone(), piece(6, &[0.0; 4])]).contains("those from 4 to 5"));
        assert!(problem(&[head.clone(), piece(3, &[0.0; 7])]).contains("number 3 of it was written by two"));
        assert!(problem(&[head.clone(), piece(4, &[0.0; 7])]).contains("a piece ends at 11"));
        let mut other = tail;
        other.shape = vec![5, 2];
        assert!(problem(&[head, other]).contains("[2, 5], another as part of [5, 2]"));
    }
}
