//! Writing a model folder that transformers and vLLM load.
//!
//! The folder is written in place and every file is flushed to the disk before [`save_folder`] returns;
//! publishing it (rename, commit marker) is the caller's decision.

use super::{experts::released_layout, header, header::Entry, ModelConfig, ModelError};
use crate::base::{DType, WeightTensor};
use serde_json::{json, Map, Value};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// Largest safetensors file; transformers' own limit is of the same size.
pub const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// Files beside the weights that belong to a model and are copied as they are.
pub const AUXILIARY_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
];

/// Writes `config.json`, the tensors, and the [`AUXILIARY_FILES`] of `auxiliary_from`. The tensors must
/// be exactly those of the config's table, in any order; experts are stored as folders of the type are
/// released.
pub fn save_folder(
    dir: &Path,
    config: &ModelConfig,
    tensors: &[WeightTensor],
    auxiliary_from: Option<&Path>,
) -> Result<(), ModelError> {
    save_folder_sharded(dir, config, tensors, auxiliary_from, MAX_SHARD_BYTES)
}

/// [`save_folder`] with a limit on the bytes of one file; a tensor is never split.
pub fn save_folder_sharded(
    dir: &Path,
    config: &ModelConfig,
    tensors: &[WeightTensor],
    auxiliary_from: Option<&Path>,
    max_shard_bytes: usize,
) -> Result<(), ModelError> {
    check_complete(dir, config, tensors)?;
    let tensors = &released_layout(config, tensors)[..];
    std::fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
    if let Some(from) = auxiliary_from {
        for name in AUXILIARY_FILES {
            let source = from.join(name);
            if source.is_file() {
                let data = std::fs::read(&source).map_err(ModelError::io(&source))?;
                write_file(&dir.join(name), &[&data])?;
            }
        }
    }
    let shards = split(tensors, max_shard_bytes);
    if let [only] = shards.as_slice() {
        write_safetensors(&dir.join("model.safetensors"), only)?;
    } else {
        let mut weight_map = Map::new();
        for (i, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
            write_safetensors(&dir.join(&name), shard)?;
            for tensor in *shard {
                weight_map.insert(tensor.name.clone(), json!(name));
            }
        }
        let total: usize = tensors.iter().map(|t| t.data.len()).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    let mut value = config.to_value();
    if let (Value::Object(map), Some(first)) = (&mut value, tensors.first()) {
        let dtype = match first.dtype {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
        };
        let key = if map.contains_key("dtype") {
            "dtype"
        } else {
            "torch_dtype"
        };
        map.insert(key.into(), json!(dtype));
    }
    write_json(&dir.join("config.json"), &value)?;
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(ModelError::io(dir))
}

fn check_complete(dir: &Path, config: &ModelConfig, tensors: &[WeightTensor]) -> Result<(), ModelError> {
    let table = config.tensor_table();
    let bad = |name: &str, problem: String| ModelError::Tensor {
        name: name.to_string(),
        path: dir.to_path_buf(),
        problem,
    };
    for spec in &table {
        let mut found = tensors.iter().filter(|t| t.name == spec.name);
        let Some(tensor) = found.next() else {
            return Err(bad(
                &spec.name,
                "it is missing among the tensors to be written".into(),
            ));
        };
        if found.next().is_some() {
            return Err(bad(&spec.name, "it is given twice".into()));
        }
        if tensor.shape != spec.shape || tensor.data.len() != spec.numel() * tensor.dtype.size_bytes() {
            return Err(bad(
                &spec.name,
                format!(
                    "shape {:?} and {} bytes are given, shape {:?} is wanted",
                    tensor.shape,
                    tensor.data.len(),
                    spec.shape
                ),
            ));
        }
    }
    match tensors.iter().find(|t| table.iter().all(|s| s.name != t.name)) {
        Some(extra) => Err(bad(&extra.name, "the model has no such tensor".into())),
        None => Ok(()),
    }
}

/// Cuts the list into runs of at most `max_bytes`; a larger tensor is a run of its own.
fn split(tensors: &[WeightTensor], max_bytes: usize) -> Vec<&[WeightTensor]> {
    let mut runs = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > start && bytes + tensor.data.len() > max_bytes {
            runs.push(&tensors[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += tensor.data.len();
    }
    runs.push(&tensors[start..]);
    runs
}

fn write_safetensors(path: &Path, tensors: &[WeightTensor]) -> Result<(), ModelError> {
    let mut at = 0;
    let entries: Vec<(String, Entry)> = tensors
        .iter()
        .map(|t| {
            let begin = at;
            at += t.data.len();
            let dtype = match t.dtype {
                DType::F32 => "F32",
                DType::Bf16 => "BF16",
            };
            let entry = Entry {
                dtype: dtype.into(),
                shape: t.shape.clone(),
                data_offsets: (begin, at),
            };
            (t.name.clone(), entry)
        })
        .collect();
    let head = header::write(&entries).map_err(|source| ModelError::Json {
        path: path.to_path_buf(),
        source,
    })?;
    let mut parts: Vec<&[u8]> = vec![&head];
    parts.extend(tensors.iter().map(|t| t.data.as_ref()));
    write_file(path, &parts)
}

fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|source| ModelError::Json {
        path: path.to_path_buf(),
        source,
    })?;
    text.push(b'\n');
    write_file(path, &[&text])
}

fn write_file(path: &Path, parts: &[&[u8]]) -> Result<(), ModelError> {
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        for part in parts {
            out.write_all(part)?;
        }
        out.into_inner().map_err(|e| e.into_error())?.sync_all()
    };
    write().map_err(ModelError::io(path))
}
