//! The folder of all checkpoints of an experiment.

use super::{
    content::{CheckpointContent, CriticState, ModelFiles, RunState},
    storage::{DiskStorage, Storage},
    tensor_file::{read_tensors, write_tensors},
    CheckpointError,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

const MARKER: &str = "COMMITTED";
const LATEST: &str = "latest_checkpointed_iteration.txt";
const PREFIX: &str = "global_step_";
const FORMAT: u32 = 1;

/// Content of the commit marker.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    format: u32,
    step: u32,
    files: Vec<FileRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileRecord {
    path: String,
    size: u64,
    crc32: u32,
}

/// A published checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedCheckpoint {
    /// Global step.
    pub step: u32,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub size_bytes: u64,
}

/// A folder that looks like a checkpoint and is not usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Why.
    pub problem: String,
}

/// Result of the search for the newest usable checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatestCheckpoint {
    /// The newest intact one.
    pub checkpoint: Option<CommittedCheckpoint>,
    /// Newer folders that were passed over; each was logged as a warning.
    pub skipped: Vec<SkippedCheckpoint>,
}

/// Checkpoints of one experiment. One writer at a time.
#[derive(Clone)]
pub struct CheckpointStore {
    root: PathBuf,
    storage: Arc<dyn Storage>,
}

impl CheckpointStore {
    /// Opens `root` (`CKPTS_DIR/<project>/<experiment>`) and makes it where it is missing.
    pub fn open(root: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(root).map_err(at("create", root))?;
        Ok(Self::with_storage(root, Arc::new(DiskStorage)))
    }

    /// Opens an existing folder through another storage.
    pub fn with_storage(root: &Path, storage: Arc<dyn Storage>) -> Self {
        Self {
            root: root.to_owned(),
            storage,
        }
    }

    /// The folder of all checkpoints.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Folder of a step, whether or not it exists.
    pub fn folder(&self, step: u32) -> PathBuf {
        self.root.join(format!("{PREFIX}{step}"))
    }

    /// The newest checkpoint whose every file has the size and checksum of its marker. Unpublished and
    /// damaged folders are logged by name and passed over.
    pub fn latest_committed(&self) -> Result<LatestCheckpoint, CheckpointError> {
        let mut found = LatestCheckpoint::default();
        for step in self.steps()?.into_iter().rev() {
            // A folder that was being replaced when the program died is still whole under `.old`.
            for path in [self.folder(step), self.aside(step, "old")] {
                if !path.is_dir() {
                    continue;
                }
                match verify(&path, step) {
                    Ok(size_bytes) => {
                        found.checkpoint = Some(CommittedCheckpoint {
                            step,
                            path,
                            size_bytes,
                        });
                        return Ok(found);
                    }
                    Err(problem) => {
                        tracing::warn!(
                            path = %path.display(),
                            %problem,
                            "checkpoint is not usable; looking for an older one"
                        );
                        found.skipped.push(SkippedCheckpoint { path, problem });
                    }
                }
            }
        }
        Ok(found)
    }

    /// Steps with a commit marker, oldest first, without checking their files.
    pub fn committed_steps(&self) -> Result<Vec<u32>, CheckpointError> {
        let mut steps = self.steps()?;
        steps.retain(|step| self.folder(*step).join(MARKER).is_file());
        Ok(steps)
    }

    /// Writes and publishes a checkpoint. When this returns, it survives a power cut. On an error
    /// nothing was published and the temporary folder is removed, so that it takes no space.
    pub fn write(&self, content: &CheckpointContent) -> Result<CommittedCheckpoint, CheckpointError> {
        let step = content.state.global_step;
        let temporary = self.aside(step, "tmp");
        let result = self.write_and_publish(content, &temporary);
        if result.is_err() && temporary.exists() {
            if let Err(error) = self.storage.remove_dir_all(&temporary) {
                tracing::warn!(path = %temporary.display(), %error, "cannot remove an unfinished checkpoint");
            }
        }
        result
    }

    fn write_and_publish(
        &self,
        content: &CheckpointContent,
        temporary: &Path,
    ) -> Result<CommittedCheckpoint, CheckpointError> {
        let step = content.state.global_step;
        let files = self.write_files(content, temporary)?;
        let size_bytes = files.iter().map(|f| f.size).sum();

        // Replace a folder of the same step. An intact one steps aside until the new one is published.
        let folder = self.folder(step);
        let old = self.aside(step, "old");
        let mut replaced = false;
        if folder.exists() {
            if verify(&folder, step).is_ok() {
                if old.exists() {
                    self.storage.remove_dir_all(&old).map_err(at("remove", &old))?;
                }
                self.storage
                    .rename(&folder, &old)
                    .map_err(at("rename", &folder))?;
                replaced = true;
            } else {
                self.storage
                    .remove_dir_all(&folder)
                    .map_err(at("remove", &folder))?;
            }
        }
        self.storage
            .rename(temporary, &folder)
            .map_err(at("rename", temporary))?;
        self.storage
            .sync_dir(&self.root)
            .map_err(at("sync", &self.root))?;

        let marker = Marker {
            format: FORMAT,
            step,
            files,
        };
        self.replace_file(&folder.join(MARKER), &to_json(&marker, &folder)?)?;
        // Published. What follows may fail without harm: readers go by markers, not by this file.
        self.replace_file(&self.root.join(LATEST), step.to_string().as_bytes())?;
        if replaced {
            self.storage.remove_dir_all(&old).map_err(at("remove", &old))?;
        }
        Ok(CommittedCheckpoint {
            step,
            path: folder,
            size_bytes,
        })
    }

    /// Writes and syncs all files of a checkpoint below `temporary`.
    fn write_files(
        &self,
        content: &CheckpointContent,
        temporary: &Path,
    ) -> Result<Vec<FileRecord>, CheckpointError> {
        if temporary.exists() {
            self.storage
                .remove_dir_all(temporary)
                .map_err(at("remove", temporary))?;
        }
        let mut folders = vec![
            temporary.to_owned(),
            temporary.join("actor"),
            temporary.join("huggingface"),
        ];
        if content.critic.is_some() {
            folders.push(temporary.join("critic"));
        }
        for folder in &folders {
            self.storage.create_dir(folder).map_err(at("create", folder))?;
        }
        let mut files = Vec::new();
        let mut put = |name: &str, write: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
            files.push(self.write_file(temporary, name, write)?);
            Ok::<(), CheckpointError>(())
        };
        let state = to_json(&content.state, temporary)?;
        put("state.json", &|out| out.write_all(&state))?;
        put("optimizer.safetensors", &|out| {
            write_tensors(out, &content.optimizer)
        })?;
        put("actor/config.json", &|out| {
            out.write_all(&content.model_files.config)
        })?;
        put("actor/model.safetensors", &|out| {
            write_tensors(out, &content.actor)
        })?;
        if let Some(critic) = &content.critic {
            put("critic/model.safetensors", &|out| {
                write_tensors(out, &critic.weights)
            })?;
            put("critic/optimizer.safetensors", &|out| {
                write_tensors(out, &critic.optimizer)
            })?;
        }
        put("huggingface/config.json", &|out| {
            out.write_all(&content.model_files.config)
        })?;
        put("huggingface/model.safetensors", &|out| {
            write_tensors(out, &content.export)
        })?;
        for (name, bytes) in &content.model_files.others {
            put(&format!("huggingface/{name}"), &|out| out.write_all(bytes))?;
        }
        for folder in folders.iter().rev() {
            self.storage.sync_dir(folder).map_err(at("sync", folder))?;
        }
        Ok(files)
    }

    fn write_file(
        &self,
        folder: &Path,
        name: &str,
        write: &dyn Fn(&mut dyn Write) -> io::Result<()>,
    ) -> Result<FileRecord, CheckpointError> {
        let path = folder.join(name);
        let mut file = self.storage.create_file(&path).map_err(at("create", &path))?;
        let mut counted = Counted {
            out: &mut *file,
            size: 0,
            hasher: crc32fast::Hasher::new(),
        };
        write(&mut counted).map_err(at("write", &path))?;
        let (size, crc32) = (counted.size, counted.hasher.finalize());
        file.sync().map_err(at("sync", &path))?;
        Ok(FileRecord {
            path: name.to_owned(),
            size,
            crc32,
        })
    }

    /// Writes a small file aside, syncs it and renames it into place.
    fn replace_file(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let folder = path.parent().unwrap_or(&self.root);
        let aside = path.with_extension("tmp");
        if aside.exists() {
            self.storage.remove_file(&aside).map_err(at("remove", &aside))?;
        }
        let mut file = self.storage.create_file(&aside).map_err(at("create", &aside))?;
        file.write_all(bytes).map_err(at("write", &aside))?;
        file.sync().map_err(at("sync", &aside))?;
        drop(file);
        self.storage.rename(&aside, path).map_err(at("rename", &aside))?;
        self.storage.sync_dir(folder).map_err(at("sync", folder))
    }

    /// Reads a published checkpoint, as [`CheckpointStore::latest_committed`] returned it.
    pub fn load(&self, checkpoint: &CommittedCheckpoint) -> Result<CheckpointContent, CheckpointError> {
        let path = &checkpoint.path;
        Ok(CheckpointContent {
            actor: read_tensors(&path.join("actor/model.safetensors"))?,
            export: read_tensors(&path.join("huggingface/model.safetensors"))?,
            optimizer: read_tensors(&path.join("optimizer.safetensors"))?,
            critic: read_critic(&path.join("critic"))?,
            state: self.load_state(checkpoint)?,
            model_files: ModelFiles::read(&path.join("huggingface"))?,
        })
    }

    /// Reads `state.json` alone.
    pub fn load_state(&self, checkpoint: &CommittedCheckpoint) -> Result<RunState, CheckpointError> {
        let path = checkpoint.path.join("state.json");
        let bytes = fs::read(&path).map_err(at("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|error| CheckpointError::Damaged {
            path,
            problem: error.to_string(),
        })
    }

    /// Deletes the oldest published checkpoints beyond `keep` (`MAX_CKPT_TO_KEEP`, at least 1), and
    /// remains of unfinished ones older than the newest. Returns the steps that are left, oldest first.
    pub fn retain(&self, keep: usize) -> Result<Vec<u32>, CheckpointError> {
        // A damaged checkpoint is no reason to delete an intact one, and stays for whoever looks into it.
        let mut committed = self.committed_steps()?;
        committed.retain(|step| marked_sizes_match(&self.folder(*step), *step));
        let Some(&newest) = committed.last() else {
            return Ok(committed);
        };
        let surplus = committed.len().saturating_sub(keep.max(1));
        for step in committed.drain(..surplus) {
            let folder = self.folder(step);
            // The marker goes first, so that a half-deleted folder is not mistaken for a checkpoint.
            let marker = folder.join(MARKER);
            self.storage.remove_file(&marker).map_err(at("remove", &marker))?;
            self.storage.sync_dir(&folder).map_err(at("sync", &folder))?;
            self.storage
                .remove_dir_all(&folder)
                .map_err(at("remove", &folder))?;
        }
        for step in self.steps()?.into_iter().filter(|step| *step < newest) {
            let folder = self.folder(step);
            let unfinished = (!folder.join(MARKER).is_file()).then_some(folder);
            let remains = [
                Some(self.aside(step, "tmp")),
                Some(self.aside(step, "old")),
                unfinished,
            ];
            for path in remains.into_iter().flatten().filter(|p| p.exists()) {
                self.storage.remove_dir_all(&path).map_err(at("remove", &path))?;
            }
        }
        Ok(committed)
    }

    fn aside(&self, step: u32, suffix: &str) -> PathBuf {
        self.root.join(format!("{PREFIX}{step}.{suffix}"))
    }

    /// Steps that have a folder of any kind, ascending.
    fn steps(&self) -> Result<Vec<u32>, CheckpointError> {
        let mut steps = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(at("list", &self.root))? {
            let name = entry.map_err(at("list", &self.root))?.file_name();
            let Some(rest) = name.to_str().and_then(|n| n.strip_prefix(PREFIX)) else {
                continue;
            };
            let number = rest.split_once('.').map_or(rest, |(number, _)| number);
            steps.extend(number.parse::<u32>().ok());
        }
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }
}

/// The critic of a verified checkpoint; the folder exists where the run had one.
fn read_critic(folder: &Path) -> Result<Option<CriticState>, CheckpointError> {
    if !folder.is_dir() {
        return Ok(None);
    }
    Ok(Some(CriticState {
        weights: read_tensors(&folder.join("model.safetensors"))?,
        optimizer: read_tensors(&folder.join("optimizer.safetensors"))?,
    }))
}

/// Whether the marker can be read and every file that it names has its size. Cheap: contents are not read.
fn marked_sizes_match(folder: &Path, step: u32) -> bool {
    let marker = fs::read(folder.join(MARKER)).ok();
    let marker = marker.and_then(|text| serde_json::from_slice::<Marker>(&text).ok());
    marker.is_some_and(|marker| {
        marker.format == FORMAT
            && marker.step == step
            && marker
                .files
                .iter()
                .all(|record| fs::metadata(folder.join(&record.path)).is_ok_and(|m| m.len() == record.size))
    })
}

/// Checks a folder against its marker; the text says what is wrong.
fn verify(folder: &Path, step: u32) -> Result<u64, String> {
    let text = match fs::read(folder.join(MARKER)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(format!("no {MARKER} marker: it was never completely written"));
        }
        Err(e) => return Err(format!("{MARKER}: {e}")),
    };
    let marker: Marker = serde_json::from_slice(&text).map_err(|e| format!("{MARKER} is damaged: {e}"))?;
    if marker.format != FORMAT {
        return Err(format!(
            "{MARKER} has format {}, this program reads {FORMAT}",
            marker.format
        ));
    }
    if marker.step != step {
        return Err(format!("{MARKER} is of step {}", marker.step));
    }
    let mut total = 0;
    for record in &marker.files {
        let path = folder.join(&record.path);
        let (size, crc32) = fingerprint(&path).map_err(|e| format!("{}: {e}", record.path))?;
        if size != record.size {
            return Err(format!(
                "{} has {size} bytes instead of {}",
                record.path, record.size
            ));
        }
        if crc32 != record.crc32 {
            return Err(format!(
                "{} has checksum {crc32:08x} instead of {:08x}",
                record.path, record.crc32
            ));
        }
        total += size;
    }
    Ok(total)
}

fn fingerprint(path: &Path) -> io::Result<(u64, u32)> {
    let mut file = File::open(path)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((size, hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
        size += count as u64;
    }
}

struct Counted<'a> {
    out: &'a mut dyn Write,
    size: u64,
    hasher: crc32fast::Hasher,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.size += count as u64;
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn to_json<T: Serialize>(value: &T, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    serde_json::to_vec_pretty(value).map_err(|error| CheckpointError::Damaged {
        path: path.to_owned(),
        problem: format!("state cannot be written as JSON: {error}"),
    })
}

fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { action, path, source }
}
