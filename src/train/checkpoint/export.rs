//! The folder `huggingface/`, written out of the pieces of all ranks.
//!
//! Its tensors are planned beforehand from the starting policy's headers ([`stored_layout`]): names, shapes
//! and the place of each in the network. Writing copies runs of bytes from the memory maps of the pieces (or of
//! the starting policy, for what is not the network's) into the file; no tensor is put together in memory.
//! Above [`ExportLayout::max_file_bytes`] the tensors are spread over `model-00001-of-0000N.safetensors` with
//! `model.safetensors.index.json`, as transformers does; a tensor is never split.
//!
//! [`stored_layout`]: crate::model::hf::stored_layout

use super::{
    pieces::PieceIndex,
    tensor_file::{write_header, Entry},
};
use crate::model::hf::{LayoutSource, LayoutTensor, MAX_SHARD_BYTES};
use serde_json::{json, Map};
use std::io::{self, Write};

/// What the export holds.
#[derive(Clone, Debug)]
pub struct ExportLayout {
    /// Its tensors, in the order of the files.
    pub tensors: Vec<LayoutTensor>,
    /// Most bytes of tensors in a file; a larger tensor has a file of its own.
    pub max_file_bytes: usize,
}

/// A file of the export.
pub(super) struct ExportFile<'a> {
    pub name: String,
    pub tensors: &'a [LayoutTensor],
}

impl ExportLayout {
    /// With files of the size that transformers writes.
    pub fn new(tensors: Vec<LayoutTensor>) -> Self {
        Self {
            tensors,
            max_file_bytes: MAX_SHARD_BYTES,
        }
    }

    /// The files, in order.
    pub(super) fn files(&self) -> Vec<ExportFile<'_>> {
        let mut runs = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (place, tensor) in self.tensors.iter().enumerate() {
            let size = tensor.size_bytes();
            if place > start && bytes + size > self.max_file_bytes {
                runs.push(start..place);
                (start, bytes) = (place, 0);
            }
            bytes += size;
        }
        runs.push(start..self.tensors.len());
        let count = runs.len();
        let name = |place: usize| match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", place + 1),
        };
        let file = |(place, run): (usize, std::ops::Range<usize>)| ExportFile {
            name: name(place),
            tensors: &self.tensors[run],
        };
        runs.into_iter().enumerate().map(file).collect()
    }

    /// The first tensor of the network that the pieces do not hold, with what is wrong.
    pub(super) fn problem(&self, pieces: &PieceIndex<'_>) -> Option<String> {
        self.tensors.iter().find_map(|tensor| {
            let LayoutSource::Network { tensor: from, start } = &tensor.source else {
                return None;
            };
            let has: usize = match pieces.shape(from) {
                Some(shape) => shape.iter().product(),
                None => return Some(format!("tensor `{from}` was written by no rank")),
            };
            let end = start + tensor.numel();
            (end > has).then(|| {
                format!(
                    "`{}` ends at number {end} of `{from}`, which has {has}",
                    tensor.name
                )
            })
        })
    }
}

/// `model.safetensors.index.json` of several files.
pub(super) fn index(files: &[ExportFile<'_>]) -> serde_json::Value {
    let mut weight_map = Map::new();
    let mut total = 0;
    for file in files {
        for tensor in file.tensors {
            weight_map.insert(tensor.name.clone(), json!(file.name));
            total += tensor.size_bytes();
        }
    }
    json!({ "metadata": { "total_size": total }, "weight_map": weight_map })
}

impl ExportFile<'_> {
    /// Writes header and tensors.
    pub(super) fn write(&self, out: &mut dyn Write, pieces: &PieceIndex<'_>) -> io::Result<()> {
        let mut entries = Vec::with_capacity(self.tensors.len());
        for tensor in self.tensors {
            entries.push(Entry {
                name: &tensor.name,
                dtype: tensor.dtype.file_name(),
                shape: tensor.shape.clone(),
                bytes: tensor.size_bytes(),
            });
        }
        write_header(out, &entries, None)?;
        for tensor in self.tensors {
            match &tensor.source {
                LayoutSource::Folder(bytes) => out.write_all(bytes)?,
                LayoutSource::Network { tensor: from, start } => {
                    for run in pieces.bytes(from, *start..start + tensor.numel()) {
                        out.write_all(run)?;
                    }
                }
            }
        }
        Ok(())
    }
}
