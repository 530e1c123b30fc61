//! Writing a trained policy back as the folder that it came from.
//!
//! The new folder has the files of the source: the same shards with the same tensors in the same order,
//! shapes and element types, and every other file as it is. Tensors of the network get their new values;
//! all others (vision tower, draft layers for multi-token prediction, …) are copied byte for byte. At
//! most three tensors of the network are in memory at a time.

use super::{header, header::Entry, Checkpoint, ModelConfig, ModelError, StoredDType, TensorSpec};
use crate::base::{DType, WeightTensor};
use bytes::Bytes;
use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

/// Endings of files that hold weights; a folder may keep the same weights in several formats, and copies
/// of old weights must not lie beside new ones.
const WEIGHT_ENDINGS: [&str; 6] = ["safetensors", "bin", "pt", "pth", "gguf", "onnx"];

const HEAD: &str = "lm_head.weight";

/// Tensors of the network that are kept for the next parts of them.
const RECENT: usize = 3;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportReport {
    /// Stored tensors that belong to the network.
    pub written: usize,
    /// Stored tensors that were copied byte for byte.
    pub passed_through: usize,
    /// Bytes of all safetensors files.
    pub bytes: u64,
}

/// Where a stored tensor comes from.
struct Origin {
    /// Index in the network's table.
    place: usize,
    /// First element within the tensor of the network.
    start: usize,
}

/// Writes `out` as a copy of the model folder `source` in which the tensors of the network have the values
/// that `values` gives, in f32 or bf16. `out` must not hold weights yet. Files appear there when all of them are
/// written; after an error, `out` is as it was.
pub fn export_folder(
    source: &Path,
    out: &Path,
    mut values: impl FnMut(&TensorSpec) -> Result<WeightTensor, ModelError>,
) -> Result<ExportReport, ModelError> {
    let config = ModelConfig::from_dir(source)?;
    let checkpoint = Checkpoint::open(source)?;
    checkpoint.check(&config)?;
    let draft = Draft::new(out)?;
    let table = config.tensor_table();
    let origins = origins(&config, &checkpoint, &table);
    let mut report = ExportReport::default();
    // Files list the experts of a layer in turns of gate, up and down, which are parts of two tensors.
    let mut recent: VecDeque<(usize, WeightTensor)> = VecDeque::new();
    for (path, map) in checkpoint.shards() {
        let entries = header::read(map, path)?;
        let Some(name) = path.file_name() else { continue };
        let target = draft.dir.join(name);
        let file = File::create(&target).map_err(ModelError::io(&target))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let mut write = |bytes: &[u8]| -> Result<(), ModelError> {
            report.bytes += bytes.len() as u64;
            file.write_all(bytes).map_err(ModelError::io(&target))
        };
        write(head_of(map))?;
        for (name, entry) in &entries {
            let Some(origin) = origins.get(name) else {
                report.passed_through += 1;
                write(&map[entry.range()])?;
                continue;
            };
            let tensor = match recent.iter().find(|(place, _)| *place == origin.place) {
                Some((_, tensor)) => tensor.clone(),
                None => {
                    let spec = &table[origin.place];
                    let tensor = values(spec)?;
                    check_shape(&tensor, spec, out)?;
                    recent.truncate(RECENT - 1);
                    recent.push_front((origin.place, tensor.clone()));
                    tensor
                }
            };
            report.written += 1;
            write(&convert(&tensor, origin.start, entry, name, path)?)?;
        }
        let file = file
            .into_inner()
            .map_err(|e| ModelError::io(&target)(e.into_error()))?;
        file.sync_all().map_err(ModelError::io(&target))?;
    }
    copy_other_files(source, &draft.dir)?;
    draft.publish(out)?;
    Ok(report)
}

/// The files of an export while they are written: a hidden folder in the one where they will lie. It goes away
/// when it is dropped, with the folders that were made for it.
struct Draft {
    dir: PathBuf,
    /// Outermost folder that was not there before.
    made: Option<PathBuf>,
}

impl Draft {
    fn new(out: &Path) -> Result<Self, ModelError> {
        let missing = out
            .ancestors()
            .take_while(|path| path.symlink_metadata().is_err());
        let mut draft = Self {
            dir: out.join(format!(".export-{}", std::process::id())),
            made: missing
                .last()
                .filter(|path| !path.as_os_str().is_empty())
                .map(Path::to_path_buf),
        };
        if out.is_dir() {
            if let Err(error) = refuse_old_weights(out) {
                // Nothing was made.
                draft.dir = PathBuf::new();
                return Err(error);
            }
        }
        std::fs::create_dir_all(&draft.dir).map_err(ModelError::io(out))?;
        Ok(draft)
    }

    /// Moves all files to `out`, the weights last: a folder without them is none to any reader.
    fn publish(mut self, out: &Path) -> Result<(), ModelError> {
        let entries = std::fs::read_dir(&self.dir).map_err(ModelError::io(&self.dir))?;
        let mut paths = Vec::new();
        for entry in entries {
            paths.push(entry.map_err(ModelError::io(&self.dir))?.path());
        }
        paths.sort_by_key(|path| is_weight_file(path));
        for path in paths {
            let target = out.join(path.file_name().unwrap_or_default());
            std::fs::rename(&path, &target).map_err(ModelError::io(&target))?;
        }
        self.made = None;
        let synced = File::open(out).and_then(|dir| dir.sync_all());
        synced.map_err(ModelError::io(out))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.dir.as_os_str().is_empty() {
            return;
        }
        // What cannot be removed is left; the error that led here says more.
        let _ = std::fs::remove_dir_all(&self.dir);
        if let Some(made) = &self.made {
            let _ = std::fs::remove_dir_all(made);
        }
    }
}

/// A tensor of a model folder that is to be written, and where its bytes come from.
#[derive(Clone, Debug)]
pub struct LayoutTensor {
    /// Name in the folder.
    pub name: String,
    /// Element type in the folder.
    pub dtype: StoredDType,
    /// Shape.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub source: LayoutSource,
}

/// Where the bytes of a [`LayoutTensor`] come from.
#[derive(Clone, Debug)]
pub enum LayoutSource {
    /// A run of numbers of a tensor of the network, in f32.
    Network {
        /// Name of that tensor.
        tensor: String,
        /// Its first number, row by row.
        start: usize,
    },
    /// The source folder's own, as they are; they stay in its memory map.
    Folder(Bytes),
}

impl LayoutTensor {
    /// Numbers.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in the folder.
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }
}

/// How a trained policy is stored in the layout of the folder `source`: the network's tensors in f32, the
/// folder's other tensors behind them, byte for byte. Copies no data.
pub fn stored_layout(config: &ModelConfig, source: &Checkpoint) -> Result<Vec<LayoutTensor>, ModelError> {
    let network = |stored: TensorSpec, tensor: &str, start: usize| LayoutTensor {
        name: stored.name,
        dtype: StoredDType::F32,
        shape: stored.shape,
        source: LayoutSource::Network {
            tensor: tensor.to_owned(),
            start,
        },
    };
    let mut out = Vec::new();
    for spec in config.tensor_table() {
        let parts = source.parts(&spec);
        if parts.is_empty() {
            out.push(network(spec.clone(), &spec.name, 0));
        }
        let parts = parts.into_iter();
        out.extend(parts.map(|part| network(part.spec, &spec.name, part.start)));
    }
    if config.tie_word_embeddings && source.names().any(|name| name == HEAD) {
        let embedding = config.embedding_spec();
        let head = TensorSpec {
            name: HEAD.into(),
            shape: embedding.shape.clone(),
        };
        out.push(network(head, &embedding.name, 0));
    }
    for (name, _) in source.others(config) {
        let stored = source.get_any(name)?;
        out.push(LayoutTensor {
            name: stored.name,
            dtype: stored.dtype,
            shape: stored.shape,
            source: LayoutSource::Folder(stored.data),
        });
    }
    Ok(out)
}

/// Which stored tensors belong to the network. A tied head that is stored all the same is the embedding.
fn origins(config: &ModelConfig, checkpoint: &Checkpoint, table: &[TensorSpec]) -> HashMap<String, Origin> {
    let mut origins = HashMap::new();
    for (place, spec) in table.iter().enumerate() {
        let parts = checkpoint.parts(spec);
        if parts.is_empty() {
            origins.insert(spec.name.clone(), Origin { place, start: 0 });
        }
        for part in parts {
            let origin = Origin {
                place,
                start: part.start,
            };
            origins.insert(part.spec.name, origin);
        }
    }
    if config.tie_word_embeddings {
        origins.insert(HEAD.into(), Origin { place: 0, start: 0 });
    }
    origins
}

/// Length and header of a safetensors file whose frame was checked.
fn head_of(map: &[u8]) -> &[u8] {
    let mut length = [0u8; 8];
    length.copy_from_slice(&map[..8]);
    &map[..8 + u64::from_le_bytes(length) as usize]
}

fn check_shape(tensor: &WeightTensor, spec: &TensorSpec, out: &Path) -> Result<(), ModelError> {
    let fits = tensor.shape == spec.shape && tensor.data.len() == spec.numel() * tensor.dtype.size_bytes();
    if fits {
        return Ok(());
    }
    Err(ModelError::Tensor {
        name: spec.name.clone(),
        path: out.to_path_buf(),
        problem: format!(
            "shape {:?} and {} bytes are given, shape {:?} is wanted",
            tensor.shape,
            tensor.data.len(),
            spec.shape
        ),
    })
}

/// The elements of an entry in its element type, rounded to nearest even.
fn convert(
    tensor: &WeightTensor,
    start: usize,
    entry: &Entry,
    name: &str,
    path: &Path,
) -> Result<Bytes, ModelError> {
    let width = tensor.dtype.size_bytes();
    let numel: usize = entry.shape.iter().product();
    if (start + numel) * width > tensor.data.len() {
        return Err(ModelError::Tensor {
            name: name.to_string(),
            path: path.to_path_buf(),
            problem: format!(
                "its shape is {:?} and the network has {:?}",
                entry.shape, tensor.shape
            ),
        });
    }
    let data = tensor.data.slice(start * width..(start + numel) * width);
    let f32s = || {
        data.chunks_exact(width).map(|b| match tensor.dtype {
            DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            DType::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        })
    };
    match (entry.dtype.as_str(), tensor.dtype) {
        ("F32", DType::F32) | ("BF16", DType::Bf16) => Ok(data),
        ("F32", _) => Ok(f32s().flat_map(f32::to_le_bytes).collect()),
        ("BF16", _) => Ok(f32s()
            .flat_map(|v| half::bf16::from_f32(v).to_le_bytes())
            .collect()),
        ("F16", _) => Ok(f32s()
            .flat_map(|v| half::f16::from_f32(v).to_le_bytes())
            .collect()),
        (other, _) => Err(ModelError::Tensor {
            name: name.to_string(),
            path: path.to_path_buf(),
            problem: format!("element type {other} is not supported (supported: F32, BF16, F16)"),
        }),
    }
}

fn is_weight_file(path: &Path) -> bool {
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    WEIGHT_ENDINGS.contains(&ending)
}

fn refuse_old_weights(out: &Path) -> Result<(), ModelError> {
    for entry in std::fs::read_dir(out).map_err(ModelError::io(out))? {
        let path = entry.map_err(ModelError::io(out))?.path();
        if is_weight_file(&path) {
            return Err(ModelError::Io {
                path,
                source: std::io::Error::new(
                    std::io::ErrorKind::AlreadyExists,
                    "this file is there already; export into an empty folder",
                ),
            });
        }
    }
    Ok(())
}

/// Configuration, index, tokenizer, templates: every regular file that holds no weights.
fn copy_other_files(source: &Path, out: &Path) -> Result<(), ModelError> {
    for entry in std::fs::read_dir(source).map_err(ModelError::io(source))? {
        let path = entry.map_err(ModelError::io(source))?.path();
        let Some(name) = path
            .file_name()
            .filter(|_| path.is_file() && !is_weight_file(&path))
        else {
            continue;
        };
        let target = out.join(name);
        std::fs::copy(&path, &target).map_err(ModelError::io(&path))?;
        let synced = File::open(&target).and_then(|f| f.sync_all());
        synced.map_err(ModelError::io(&target))?;
    }
    Ok(())
}
