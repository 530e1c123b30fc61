//! Safetensors files, written as a stream and read through a memory map.
//!
//! Format: little-endian u64 length of the header, a JSON header padded with spaces to a multiple of 8,
//! then the tensors' bytes without gaps. `__metadata__.format` is `pt`, which transformers asks for.
//!
//! A piece of a tensor is an entry of one axis under the tensor's name, and `__metadata__.pieces` is a JSON
//! text that says of each what it is part of:
//!
//! ```text
//! {"model.norm.weight": {"shape": [1024], "offset": 256}, …}     offset in numbers, row by row
//! ```
//!
//! An entry that is not named there is a whole tensor.

use super::{
    pieces::{TensorPiece, NUMBER_BYTES},
    CheckpointError,
};
use bytes::Bytes;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write},
    path::Path,
};

/// What an entry is part of.
#[derive(Debug, Serialize, Deserialize)]
struct PartOf {
    shape: Vec<usize>,
    offset: usize,
}

/// An entry of a header that is written.
pub(super) struct Entry<'a> {
    pub name: &'a str,
    /// Element type as the format names it.
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: usize,
}

/// Writes everything before the tensors, whose bytes must follow in this order.
pub(super) fn write_header(
    out: &mut dyn Write,
    entries: &[Entry<'_>],
    pieces: Option<String>,
) -> io::Result<()> {
    let mut metadata = serde_json::json!({ "format": "pt" });
    if let Some(pieces) = pieces {
        metadata["pieces"] = pieces.into();
    }
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), metadata);
    let mut offset = 0usize;
    for entry in entries {
        let end = offset + entry.bytes;
        header.insert(
            entry.name.to_owned(),
            serde_json::json!({ "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)
}

/// Writes what a rank has of some tensors.
pub(super) fn write_pieces(out: &mut dyn Write, pieces: &[TensorPiece]) -> io::Result<()> {
    let mut entries = Vec::with_capacity(pieces.len());
    let mut parts = BTreeMap::new();
    for piece in pieces {
        let mut shape = piece.shape.clone();
        if !piece.is_whole() {
            let own = std::mem::replace(&mut shape, vec![piece.range().len()]);
            let part = PartOf {
                shape: own,
                offset: piece.offset,
            };
            parts.insert(piece.name.as_str(), part);
        }
        entries.push(Entry {
            name: &piece.name,
            dtype: "F32",
            shape,
            bytes: piece.data.len(),
        });
    }
    let parts = (!parts.is_empty())
        .then(|| serde_json::to_string(&parts))
        .transpose()?;
    write_header(out, &entries, parts)?;
    pieces.iter().try_for_each(|piece| out.write_all(&piece.data))
}

/// What a file has of some tensors, in the order of the bytes, which stay in one memory map.
pub(super) fn read_pieces(path: &Path) -> Result<Vec<TensorPiece>, CheckpointError> {
    let io = |action: &'static str| {
        move |source| CheckpointError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let damaged = |problem: String| CheckpointError::Damaged {
        path: path.to_owned(),
        problem,
    };
    let file = File::open(path).map_err(io("open"))?;
    // SAFETY: the file belongs to a published checkpoint, or to one whose ranks have all said that they are
    // done with it; no program of ours writes to it again.
    let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
    let bytes = Bytes::from_owner(map);
    let (header_bytes, header) =
        SafeTensors::read_metadata(&bytes).map_err(|e| damaged(format!("not a safetensors file: {e}")))?;
    let mut parts: BTreeMap<String, PartOf> =
        match header.metadata().as_ref().and_then(|meta| meta.get("pieces")) {
            Some(text) => {
                serde_json::from_str(text).map_err(|e| damaged(format!("its list of pieces: {e}")))?
            }
            None => BTreeMap::new(),
        };
    let mut entries: Vec<_> = header.tensors().into_iter().collect();
    entries.sort_by_key(|(_, info)| info.data_offsets);
    let start = size_of::<u64>() + header_bytes;
    entries
        .into_iter()
        .map(|(name, info)| {
            if info.dtype != Dtype::F32 {
                return Err(damaged(format!(
                    "tensor `{name}` has element type {:?}; checkpoints are in F32",
                    info.dtype
                )));
            }
            let (from, to) = info.data_offsets;
            let part = parts.remove(&name).unwrap_or_else(|| PartOf {
                shape: info.shape.clone(),
                offset: 0,
            });
            debug_assert_eq!((to - from) % NUMBER_BYTES, 0);
            Ok(TensorPiece {
                name,
                shape: part.shape,
                offset: part.offset,
                data: bytes.slice(start + from..start + to),
            })
        })
        .collect()
}
