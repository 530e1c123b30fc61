//! Safetensors files, written as a stream and read through a memory map.
//!
//! Format: little-endian u64 length of the header, a JSON header padded with spaces to a multiple of 8,
//! then the tensors' bytes without gaps. `__metadata__.format` is `pt`, which transformers asks for.

use super::CheckpointError;
use crate::base::{DType, WeightTensor};
use bytes::Bytes;
use memmap2::Mmap;
use safetensors::{Dtype as FileDtype, SafeTensors};
use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

/// Writes all tensors.
pub(super) fn write_tensors(out: &mut dyn Write, tensors: &[WeightTensor]) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!({ "format": "pt" }));
    let mut offset = 0usize;
    for tensor in tensors {
        let end = offset + tensor.data.len();
        let dtype = match tensor.dtype {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
        };
        header.insert(
            tensor.name.clone(),
            serde_json::json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)?;
    for tensor in tensors {
        out.write_all(&tensor.data)?;
    }
    Ok(())
}

/// Reads all tensors, in the order of their bytes. They share one memory map.
pub(super) fn read_tensors(path: &Path) -> Result<Vec<WeightTensor>, CheckpointError> {
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
    // SAFETY: the file belongs to a published checkpoint, which no program of ours writes to again.
    let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
    let bytes = Bytes::from_owner(map);
    let parsed =
        SafeTensors::deserialize(&bytes).map_err(|e| damaged(format!("not a safetensors file: {e}")))?;
    let mut views = parsed.tensors();
    views.sort_by_key(|(_, view)| view.data().as_ptr() as usize);
    views
        .into_iter()
        .map(|(name, view)| {
            let dtype = match view.dtype() {
                FileDtype::F32 => DType::F32,
                FileDtype::BF16 => DType::Bf16,
                other => return Err(damaged(format!("tensor `{name}` has element type {other:?}"))),
            };
            Ok(WeightTensor {
                name,
                dtype,
                shape: view.shape().to_vec(),
                data: bytes.slice_ref(view.data()),
            })
        })
        .collect()
}
