//! The frame of a safetensors file: a little-endian u64 header length, a JSON header padded with
//! spaces to 8 bytes, then the tensors back to back. Format: github.com/huggingface/safetensors, README.
//!
//! Reading checks every entry against the file's real length by itself, because a cut-off shard must be
//! reported with the name of the first tensor that is incomplete.

use super::ModelError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{ops::Range, path::Path};

/// Longest header that is believed; the reference implementation has the same bound.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of the header.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub dtype: String,
    pub shape: Vec<usize>,
    /// Offsets behind the header; after [`read`], offsets in the file.
    pub data_offsets: (usize, usize),
}

impl Entry {
    pub fn range(&self) -> Range<usize> {
        self.data_offsets.0..self.data_offsets.1
    }
}

/// Bytes of an element of the given safetensors type, for the types that are read.
pub(super) fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "F32" => Some(4),
        "BF16" | "F16" => Some(2),
        _ => None,
    }
}

/// Reads the header of a mapped file; the entries come in file order.
pub(super) fn read(file: &[u8], path: &Path) -> Result<Vec<(String, Entry)>, ModelError> {
    let broken = |problem: String| ModelError::Safetensors {
        path: path.to_path_buf(),
        problem,
    };
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(broken(format!("it has only {} bytes", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES || length as usize > rest.len() {
        return Err(broken(format!(
            "it announces a header of {length} bytes and {} follow",
            rest.len()
        )));
    }
    let start = 8 + length as usize;
    let header: Map<String, Value> =
        serde_json::from_slice(&rest[..length as usize]).map_err(|e| broken(format!("its header: {e}")))?;
    let mut entries = Vec::with_capacity(header.len());
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let mut entry: Entry =
            serde_json::from_value(value).map_err(|e| broken(format!("header entry of `{name}`: {e}")))?;
        let (begin, end) = entry.data_offsets;
        if begin > end || end > usize::MAX - start {
            return Err(broken(format!(
                "header entry of `{name}`: offsets {begin} to {end}"
            )));
        }
        entry.data_offsets = (begin + start, end + start);
        entries.push((name, entry));
    }
    entries.sort_by_key(|(_, e)| e.data_offsets);
    let mut at = start;
    for (name, entry) in &entries {
        let problem = check(entry, at, file.len());
        if let Some(problem) = problem {
            return Err(ModelError::Tensor {
                name: name.clone(),
                path: path.to_path_buf(),
                problem,
            });
        }
        at = entry.data_offsets.1;
    }
    if at != file.len() {
        return Err(broken(format!(
            "{} bytes follow the last tensor",
            file.len() - at
        )));
    }
    Ok(entries)
}

/// What is wrong with an entry that should start at `at`, in a file of `file_bytes`.
fn check(entry: &Entry, at: usize, file_bytes: usize) -> Option<String> {
    let (begin, end) = entry.data_offsets;
    if begin != at {
        return Some(format!(
            "its bytes start at {begin} and the one before ends at {at}"
        ));
    }
    if end > file_bytes {
        return Some(format!(
            "it ends at byte {end} and the file has {file_bytes}: the file is cut off"
        ));
    }
    let numel = entry
        .shape
        .iter()
        .try_fold(1usize, |product, n| product.checked_mul(*n));
    let bytes = element_bytes(&entry.dtype)
        .zip(numel)
        .map(|(b, n)| b.checked_mul(n));
    match bytes {
        Some(Some(n)) if n == end - begin => None,
        // Types that are not read are reported when the tensor is asked for.
        None if numel.is_some() => None,
        _ => Some(format!(
            "{} bytes do not hold shape {:?} of {}",
            end - begin,
            entry.shape,
            entry.dtype
        )),
    }
}

/// The bytes before the tensors of a file with these entries (offsets relative to the header's end).
pub(super) fn write(entries: &[(String, Entry)]) -> Result<Vec<u8>, serde_json::Error> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    for (name, entry) in entries {
        map.insert(name.clone(), serde_json::to_value(entry)?);
    }
    let mut json = serde_json::to_vec(&map)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}
