//! Which experts computed the tokens of a sequence: the record that routing replay (R3) trains with.
//!
//! A *row* belongs to one token: the experts of every sparse layer in layer order, `k` a layer, the most
//! likely first. Row `t` is that of the computation that read token `t` (and, if the policy sampled next, led to
//! token `t + 1`). The last token of a sequence was never read, so it has no row. Rows of a sequence are
//! neighbouring tokens in *runs*; a token outside every run was not recorded.
//!
//! An expert is one byte in models of up to 256 experts a layer and two bytes (little-endian) in larger ones.
//!
//! Rows are large (a 128k-token trial of a 40-layer model with 8 experts a token: 42 MB), so a record names
//! where they lie and is passed on instead of them: from the proxy's file to the shard they are read once, and
//! the trainer reads them from the mapped shard. They are never part of a message or of JSON.

use super::RoutedExperts;
use std::{fmt, io, sync::Arc};

/// Sizes that all rows of a model share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// Experts of a layer.
    pub num_experts: u32,
    /// Sparse layers.
    pub layers: u32,
    /// Experts that a token uses in a layer, k.
    pub top_k: u32,
}

impl fmt::Display for RoutingShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} experts in {} sparse layers",
            self.top_k, self.num_experts, self.layers
        )
    }
}

impl RoutingShape {
    /// Most experts of a layer that rows can name.
    pub const MAX_EXPERTS: u32 = i16::MAX as u32 + 1;

    /// Refuses sizes that rows cannot have.
    pub fn check(self) -> Result<Self, String> {
        let known = 1..=Self::MAX_EXPERTS;
        if self.layers == 0 || self.top_k == 0 || !known.contains(&self.num_experts) {
            return Err(format!(
                "routing of {self} is not supported (at most {} experts)",
                Self::MAX_EXPERTS
            ));
        }
        Ok(self)
    }

    /// Experts of a token over all layers.
    pub fn width(self) -> u32 {
        self.layers * self.top_k
    }

    fn is_wide(self) -> bool {
        self.num_experts > 256
    }

    /// Bytes of one row.
    pub fn row_bytes(self) -> usize {
        self.width() as usize * if self.is_wide() { 2 } else { 1 }
    }

    /// Rows of experts as bytes. The text of an error names the expert that the model does not have.
    pub fn encode(self, experts: &[u16]) -> Result<Vec<u8>, String> {
        if let Some(bad) = experts.iter().find(|e| u32::from(**e) >= self.num_experts) {
            return Err(format!(
                "expert {bad} of a layer with {} experts",
                self.num_experts
            ));
        }
        if !experts.len().is_multiple_of(self.width() as usize) {
            return Err(format!(
                "{} experts are no whole rows of {}",
                experts.len(),
                self.width()
            ));
        }
        Ok(if self.is_wide() {
            experts.iter().flat_map(|e| e.to_le_bytes()).collect()
        } else {
            experts.iter().map(|e| *e as u8).collect()
        })
    }

    fn decode(self, bytes: &[u8], out: &mut [i16]) {
        if self.is_wide() {
            for (out, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = i16::from_le_bytes([pair[0], pair[1]]);
            }
        } else {
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = i16::from(*byte);
            }
        }
    }
}

impl RoutedExperts {
    /// The rows of tokens before `end`, which the engine was asked for from `first` on. The text of an error
    /// says how the engine's answer is wrong.
    pub fn rows(&self, first: u32, end: u32, shape: RoutingShape) -> Result<&[u16], String> {
        if self.first != first || self.width != shape.width() {
            return Err(format!(
                "the engine reports experts from token {} on, {} a token, and was asked from token {first} on \
                 about a model with {}",
                self.first,
                self.width,
                shape.width()
            ));
        }
        let wanted = end.saturating_sub(first) as usize * shape.width() as usize;
        if self.experts.len() < wanted || !self.experts.len().is_multiple_of(shape.width() as usize) {
            return Err(format!(
                "the engine reports {} experts of tokens {first}..{end}, which have {wanted}",
                self.experts.len()
            ));
        }
        // Tokens behind a stop text were sampled and are not part of the reply.
        Ok(&self.experts[..wanted])
    }
}

/// Where rows lie.
pub trait RoutingStore: Send + Sync + fmt::Debug {
    /// Reads `out.len()` bytes from byte `at` on.
    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()>;
    /// All of it, where it is in memory or mapped.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }
}

impl RoutingStore for Vec<u8> {
    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        read_slice(self, at, out)
    }

    fn bytes(&self) -> Option<&[u8]> {
        Some(self)
    }
}

/// [`RoutingStore::read`] of bytes in memory.
pub fn read_slice(bytes: &[u8], at: u64, out: &mut [u8]) -> io::Result<()> {
    let range = usize::try_from(at)
        .ok()
        .and_then(|at| bytes.get(at..at.checked_add(out.len())?));
    out.copy_from_slice(range.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
    Ok(())
}

/// Rows of neighbouring tokens.
#[derive(Clone, Debug)]
pub struct RoutingRun {
    /// Position of the first token in its sequence.
    pub first: u32,
    /// How many.
    pub tokens: u32,
    /// Where the rows lie.
    pub store: Arc<dyn RoutingStore>,
    /// First byte there.
    pub at: u64,
}

/// The rows of a sequence.
#[derive(Clone, Debug)]
pub struct SequenceRouting {
    /// Sizes of a row.
    pub shape: RoutingShape,
    /// In order, without overlap.
    pub runs: Vec<RoutingRun>,
}

impl SequenceRouting {
    /// Tokens with a row.
    pub fn recorded(&self) -> usize {
        self.runs.iter().map(|run| run.tokens as usize).sum()
    }

    /// Checks the invariants for a sequence of `tokens` tokens; the text names the first one that fails.
    pub fn check(&self, tokens: usize) -> Result<(), String> {
        self.shape.check()?;
        let mut end = 0;
        for run in &self.runs {
            let last = u64::from(run.first) + u64::from(run.tokens);
            if run.first < end || last > tokens as u64 {
                return Err(format!(
                    "routing of tokens {}..{last} in a sequence of {tokens} whose rows reach to {end}",
                    run.first
                ));
            }
            end = last as u32;
        }
        Ok(())
    }

    /// Appends the bytes of all rows, in the order of the runs.
    pub fn copy_to(&self, out: &mut Vec<u8>) -> io::Result<()> {
        for run in &self.runs {
            let start = out.len();
            out.resize(start + run.tokens as usize * self.shape.row_bytes(), 0);
            run.store.read(run.at, &mut out[start..])?;
        }
        Ok(())
    }

    /// The same rows in memory or mapped: what lies in a file is read.
    pub fn loaded(&self) -> io::Result<Self> {
        let reaches = |run: &RoutingRun, bytes: &[u8]| {
            let end = run.at + u64::from(run.tokens) * self.shape.row_bytes() as u64;
            end <= bytes.len() as u64
        };
        let mapped = |run: &RoutingRun| run.store.bytes().is_some_and(|bytes| reaches(run, bytes));
        if self.runs.iter().all(mapped) {
            return Ok(self.clone());
        }
        let mut bytes = Vec::new();
        self.copy_to(&mut bytes)?;
        let store: Arc<dyn RoutingStore> = Arc::new(bytes);
        let mut at = 0;
        let runs = self.runs.iter().map(|run| {
            let run = RoutingRun {
                store: store.clone(),
                at,
                ..*run
            };
            at += u64::from(run.tokens) * self.shape.row_bytes() as u64;
            run
        });
        Ok(Self {
            shape: self.shape,
            runs: runs.collect(),
        })
    }

    /// `[tokens][width]` experts, -1 where a token was not recorded.
    pub fn dense(&self, tokens: usize) -> io::Result<Vec<i16>> {
        let (width, row_bytes) = (self.shape.width() as usize, self.shape.row_bytes());
        let mut out = vec![-1; tokens * width];
        let mut bytes = Vec::new();
        for run in &self.runs {
            bytes.resize(run.tokens as usize * row_bytes, 0);
            run.store.read(run.at, &mut bytes)?;
            let rows = out
                .get_mut(run.first as usize * width..(run.first + run.tokens) as usize * width)
                .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            self.shape.decode(&bytes, rows);
        }
        Ok(out)
    }
}

/// Equal rows of the same tokens, wherever they lie; rows that cannot be read equal nothing.
impl PartialEq for SequenceRouting {
    fn eq(&self, other: &Self) -> bool {
        let tokens = |r: &Self| {
            let runs = r.runs.iter();
            runs.map(|run| (run.first + run.tokens) as usize)
                .max()
                .unwrap_or(0)
        };
        let most = tokens(self).max(tokens(other));
        let dense = |r: &Self| r.dense(most).ok();
        self.shape == other.shape && dense(self).is_some_and(|rows| Some(rows) == dense(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u32, tokens: u32, store: &Arc<dyn RoutingStore>, at: u64) -> RoutingRun {
        RoutingRun {
            first,
            tokens,
            store: store.clone(),
            at,
        }
    }

    #[test]
    fn rows_are_one_or_two_bytes_and_come_back() {
        for num_experts in [256, 257, RoutingShape::MAX_EXPERTS] {
            let shape = RoutingShape {
                num_experts,
                layers: 3,
                top_k: 1,
            };
            let experts: Vec<u16> = (0..12)
                .map(|i| if i == 5 { (num_experts - 1) as u16 } else { i })
                .collect();
            let bytes = shape.encode(&experts).unwrap();
            assert_eq!(bytes.len(), 12 * if num_experts > 256 { 2 } else { 1 });
            let store: Arc<dyn RoutingStore> = Arc::new(bytes);
            let routing = SequenceRouting {
                shape,
                runs: vec![run(1, 1, &store, 0), run(4, 3, &store, shape.row_bytes() as u64)],
            };
            routing.check(7).unwrap();
            assert!(routing.check(6).is_err());
            assert_eq!(routing.recorded(), 4);
            let mut want = vec![-1i16; 21];
            for (place, token) in [1usize, 4, 5, 6].into_iter().enumerate() {
                for i in 0..3 {
                    want[token * 3 + i] = experts[place * 3 + i] as i16;
                }
            }
            assert_eq!(routing.dense(7).unwrap(), want);
        }
    }

    #[test]
    fn wrong_answers_of_an_engine_are_named() {
        let shape = RoutingShape {
            num_experts: 4,
            layers: 1,
            top_k: 2,
        };
        let answer = RoutedExperts {
            first: 3,
            width: 2,
            experts: vec![0, 1, 2, 3, 0, 1],
        };
        assert_eq!(answer.rows(3, 5, shape), Ok(&[0, 1, 2, 3][..]));
        for (first, end, layers) in [(2, 5, 1), (3, 5, 2), (3, 7, 1)] {
            let shape = RoutingShape { layers, ..shape };
            assert!(answer.rows(first, end, shape).is_err(), "{first} {end} {layers}");
        }
        assert!(shape.encode(&[4, 0]).is_err(), "an expert that is not there");
        assert!(shape.encode(&[1]).is_err(), "half a row");
    }
}
