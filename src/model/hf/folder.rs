//! The safetensors files of a model folder, memory-mapped.

use super::{
    experts::{self, Part},
    header,
    header::Entry,
    ModelConfig, ModelError, TensorSpec,
};
use crate::base::{files, DType, WeightTensor};
use bytes::Bytes;
use memmap2::Mmap;
use serde::Deserialize;
use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit float; becomes f32 in a [`WeightTensor`].
    F16,
}

impl StoredDType {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            StoredDType::F32 => 4,
            StoredDType::Bf16 | StoredDType::F16 => 2,
        }
    }

    /// How safetensors files name it.
    pub fn file_name(self) -> &'static str {
        match self {
            StoredDType::F32 => "F32",
            StoredDType::Bf16 => "BF16",
            StoredDType::F16 => "F16",
        }
    }
}

/// A tensor where it lies. Cloning copies no data.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Checkpoint name.
    pub name: String,
    /// Element type.
    pub dtype: StoredDType,
    /// Shape.
    pub shape: Vec<usize>,
    /// The file's bytes, little-endian, row-major.
    pub data: Bytes,
    /// The file, for messages.
    pub path: PathBuf,
}

impl StoredTensor {
    /// For the wire and for [`super::save_folder`]: f32 and bf16 without a copy, f16 widened to f32.
    pub fn to_weight(&self) -> WeightTensor {
        let (dtype, data) = match self.dtype {
            StoredDType::F32 => (DType::F32, self.data.clone()),
            StoredDType::Bf16 => (DType::Bf16, self.data.clone()),
            StoredDType::F16 => {
                let widen = |b: &[u8]| half::f16::from_le_bytes([b[0], b[1]]).to_f32().to_le_bytes();
                (DType::F32, self.data.chunks_exact(2).flat_map(widen).collect())
            }
        };
        WeightTensor {
            name: self.name.clone(),
            dtype,
            shape: self.shape.clone(),
            data,
        }
    }
}

/// A range of a mapped file, kept alive by the `Bytes` made from it.
struct MappedRange {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for MappedRange {
    fn as_ref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
}

/// All tensors of a model folder.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, (usize, Entry)>,
}

/// The weights of a training checkpoint lie in pieces, one file a rank, which is no model folder.
fn refuse_pieces(dir: &Path) -> Result<(), ModelError> {
    let is_piece = |name: &str| name.starts_with("model-rank-") && name.ends_with(".safetensors");
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let pieces = names.filter(|entry| entry.file_name().to_str().is_some_and(is_piece));
    match pieces.count() {
        0 => Ok(()),
        count => Err(ModelError::Safetensors {
            path: dir.join("model.safetensors"),
            problem: format!(
                "it is not there: the folder holds what {count} trainer ranks wrote of the weights, each its \
                 pieces; the same weights as a model folder are in `{}`",
                dir.parent().unwrap_or(dir).join("huggingface").display()
            ),
        }),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or the shards that `model.safetensors.index.json` names inside of the
    /// folder, and checks their headers against their lengths.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        let index_path = dir.join("model.safetensors.index.json");
        if index_path.symlink_metadata().is_err() {
            let only = dir.join("model.safetensors");
            if !only.exists() {
                refuse_pieces(dir)?;
            }
            checkpoint.add_shard(only)?;
            return Ok(checkpoint);
        }
        let text = files::read(&index_path).map_err(ModelError::io(&index_path))?;
        let index: Index = serde_json::from_slice(&text).map_err(|source| ModelError::Json {
            path: index_path.clone(),
            source,
        })?;
        for (name, file) in &index.weight_map {
            let inside = |part| matches!(part, Component::Normal(_));
            if file.is_empty() || !Path::new(file).components().all(inside) {
                return Err(ModelError::Tensor {
                    name: name.clone(),
                    path: index_path.clone(),
                    problem: format!("its file `{file}` is not a name inside of the model folder"),
                });
            }
        }
        let single = dir.join("model.safetensors");
        if single.exists() && index.weight_map.values().all(|file| file != "model.safetensors") {
            return Err(ModelError::Safetensors {
                path: single,
                problem: format!(
                    "`{}` does not name it, and programs differ in which of the two they read; remove one",
                    index_path.display()
                ),
            });
        }
        let mut first_of: BTreeMap<&String, &String> = BTreeMap::new();
        for (name, file) in &index.weight_map {
            first_of.entry(file).or_insert(name);
        }
        for (file, name) in first_of {
            checkpoint
                .add_shard(dir.join(file))
                .map_err(|error| match error {
                    ModelError::Io { path, source } => ModelError::Tensor {
                        name: name.clone(),
                        path,
                        problem: format!(
                            "{source}; `{}` says that it is in this file",
                            index_path.display()
                        ),
                    },
                    other => other,
                })?;
        }
        for (name, file) in &index.weight_map {
            if !checkpoint.tensors.contains_key(name) {
                return Err(ModelError::Tensor {
                    name: name.clone(),
                    path: dir.join(file),
                    problem: format!("`{}` says that it is here, and it is not", index_path.display()),
                });
            }
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, path: PathBuf) -> Result<(), ModelError> {
        let file = files::open(&path).map_err(ModelError::io(&path))?;
        // SAFETY: the map is private and read-only. A checkpoint folder is published by a rename and
        // never changed in place; a file that another program cuts off meanwhile would raise SIGBUS.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(&path))?;
        let shard = self.shards.len();
        for (name, entry) in header::read(&map, &path)? {
            if let Some((other, _)) = self.tensors.insert(name.clone(), (shard, entry)) {
                let problem = format!("it is also in `{}`", self.shards[other].path.display());
                return Err(ModelError::Tensor { name, path, problem });
            }
        }
        self.shards.push(Shard {
            path,
            map: Arc::new(map),
        });
        Ok(())
    }

    /// Names of all stored tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// One tensor, which must have this shape.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<StoredTensor, ModelError> {
        let Some((shard, entry)) = self.tensors.get(name) else {
            return Err(ModelError::Tensor {
                name: name.to_string(),
                path: self.dir.clone(),
                problem: "no safetensors file of the folder holds it".into(),
            });
        };
        let shard = &self.shards[*shard];
        let bad = |problem: String| ModelError::Tensor {
            name: name.to_string(),
            path: shard.path.clone(),
            problem,
        };
        if entry.shape != shape {
            return Err(bad(format!(
                "its shape is {:?} and config.json asks for {shape:?}",
                entry.shape
            )));
        }
        let dtype = match entry.dtype.as_str() {
            "F32" => StoredDType::F32,
            "BF16" => StoredDType::Bf16,
            "F16" => StoredDType::F16,
            other => {
                return Err(bad(format!(
                    "element type {other} is not supported (supported: F32, BF16, F16)"
                )))
            }
        };
        Ok(StoredTensor {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
            data: Bytes::from_owner(MappedRange {
                map: shard.map.clone(),
                range: entry.range(),
            }),
            path: shard.path.clone(),
        })
    }

    /// One tensor in the shape that it has.
    pub fn get_any(&self, name: &str) -> Result<StoredTensor, ModelError> {
        let shape = self.tensors.get(name).map(|(_, entry)| entry.shape.clone());
        self.get(name, &shape.unwrap_or_default())
    }

    /// A tensor of the network. Experts that are stored one by one are put together, which copies them;
    /// everything else stays where it lies.
    pub fn read(&self, spec: &TensorSpec) -> Result<StoredTensor, ModelError> {
        let parts = self.parts(spec);
        if parts.is_empty() {
            return self.get(&spec.name, &spec.shape);
        }
        let mut data = Vec::new();
        let mut first: Option<StoredTensor> = None;
        for part in parts {
            let stored = self.get(&part.spec.name, &part.spec.shape)?;
            match &first {
                Some(first) if first.dtype != stored.dtype => {
                    return Err(ModelError::Tensor {
                        name: stored.name,
                        path: stored.path,
                        problem: format!(
                            "its element type differs from that of `{}`, and both are experts of one layer",
                            first.name
                        ),
                    });
                }
                _ => data.extend_from_slice(&stored.data),
            }
            first.get_or_insert(stored);
        }
        let Some(first) = first else {
            unreachable!("the list of parts is not empty")
        };
        Ok(StoredTensor {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            data: data.into(),
            ..first
        })
    }

    /// Refuses a folder that holds a tensor of the network twice: stacked experts beside experts one by one, or a head
    /// that is not the embedding where `tie_word_embeddings` says that it is. Reads at most these two matrices.
    ///
    /// # Errors
    /// The tensor, its file, and what contradicts it.
    pub fn check_unambiguous(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let refuse = |name: &str, problem: String| {
            let stored = self.tensors.get(name);
            Err(ModelError::Tensor {
                name: name.to_owned(),
                path: stored.map_or_else(|| self.dir.clone(), |(shard, _)| self.shards[*shard].path.clone()),
                problem,
            })
        };
        for spec in config.tensor_table() {
            if !self.tensors.contains_key(&spec.name) {
                continue;
            }
            let split = experts::parts(&spec).into_iter().map(|part| part.spec.name);
            if let Some(other) = split.into_iter().find(|name| self.tensors.contains_key(name)) {
                return refuse(
                    &spec.name,
                    format!("the folder also holds `{other}`, the same weights in another layout; remove one of them"),
                );
            }
        }
        const HEAD: &str = "lm_head.weight";
        if config.tie_word_embeddings && self.tensors.contains_key(HEAD) {
            let embedding = config.embedding_spec();
            let (head, embedded) = (self.get_any(HEAD)?, self.read(&embedding)?);
            let is_same = head.shape == embedded.shape
                && if head.dtype == embedded.dtype {
                    head.data == embedded.data
                } else {
                    head.to_weight().data == embedded.to_weight().data
                };
            if !is_same {
                return refuse(
                    HEAD,
                    format!(
                        "tie_word_embeddings is true in config.json and the stored head differs from `{}`; set it to \
                         false, or remove the head",
                        embedding.name
                    ),
                );
            }
        }
        Ok(())
    }

    /// The stored tensors that make up one of the network, where it is not stored as it is.
    pub(super) fn parts(&self, spec: &TensorSpec) -> Vec<Part> {
        if self.tensors.contains_key(&spec.name) {
            return Vec::new();
        }
        experts::parts(spec)
    }

    /// Every tensor of the network, in checkpoint order. Tensors that it does not have are left out.
    pub fn read_all(&self, config: &ModelConfig) -> Result<Vec<StoredTensor>, ModelError> {
        config.tensor_table().iter().map(|t| self.read(t)).collect()
    }

    /// Looks, in the headers, whether every tensor of the network is there with its shape, and once
    /// ([`Checkpoint::check_unambiguous`]).
    pub fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        self.check_unambiguous(config)?;
        for spec in config.tensor_table() {
            let parts = self.parts(&spec);
            if parts.is_empty() {
                self.get(&spec.name, &spec.shape)?;
            }
            for part in parts {
                self.get(&part.spec.name, &part.spec.shape)?;
            }
        }
        Ok(())
    }

    /// Names and bytes of the stored tensors that do not belong to the network, sorted by name.
    pub fn others(&self, config: &ModelConfig) -> Vec<(&str, usize)> {
        let mut own = HashSet::new();
        for spec in config.tensor_table() {
            own.extend(self.parts(&spec).into_iter().map(|part| part.spec.name));
            own.insert(spec.name);
        }
        if config.tie_word_embeddings {
            // Stored all the same by some programs; it is the embedding.
            own.insert("lm_head.weight".into());
        }
        let others = self.tensors.iter().filter(|(name, _)| !own.contains(*name));
        others
            .map(|(name, (_, entry))| (name.as_str(), entry.range().len()))
            .collect()
    }

    /// The error for the first tensor with an element type of quantised checkpoints.
    pub(super) fn first_quantised(&self) -> Option<ModelError> {
        let quantised = |(_, (_, entry)): &(&String, &(usize, Entry))| {
            !matches!(entry.dtype.as_str(), "F32" | "BF16" | "F16" | "F64")
        };
        let (name, (shard, entry)) = self.tensors.iter().find(quantised)?;
        Some(ModelError::Tensor {
            name: name.clone(),
            path: self.shards[*shard].path.clone(),
            problem: format!(
                "element type {}: quantised checkpoints are not supported; use the bf16 release",
                entry.dtype
            ),
        })
    }

    /// The files with their maps, in the order in which they were opened.
    pub(super) fn shards(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.shards.iter().map(|s| (s.path.as_path(), &s.map[..]))
    }
}
