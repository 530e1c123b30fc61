//! The folder of all checkpoints of an experiment.
//!
//! A checkpoint is written in three moves: [`CheckpointStore::begin`] makes the temporary folder (rank 0),
//! [`CheckpointStore::write_part`] writes what a rank has (every rank), [`CheckpointStore::publish`] adds the
//! rest and makes it visible (rank 0). [`CheckpointStore::write`] is all of them for one rank.

use super::{
    content::{CheckpointHead, CriticState, LoadedCheckpoint, RunState, SavedTensors},
    export,
    marker::{marked_sizes_match, verify, write_recorded, FileRecord, Marker, MARKER},
    pieces::{PieceIndex, TensorPiece},
    storage::{DiskStorage, Storage},
    tensor_file::{read_pieces, write_pieces},
    CheckpointError,
};
use serde::Serialize;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

const LATEST: &str = "latest_checkpointed_iteration.txt";
const PREFIX: &str = "global_step_";
const ENDING: &str = ".safetensors";

/// Files of tensors, without what the number of ranks adds to their names.
const ACTOR: &str = "actor/model";
const OPTIMIZER: &str = "optimizer";
const CRITIC: &str = "critic/model";
const CRITIC_OPTIMIZER: &str = "critic/optimizer";

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

    /// Writes and publishes a checkpoint of one rank. When this returns, it survives a power cut. On an error
    /// nothing was published and the temporary folder is removed, so that it takes no space.
    pub fn write(
        &self,
        tensors: &SavedTensors,
        head: &CheckpointHead,
    ) -> Result<CommittedCheckpoint, CheckpointError> {
        let step = head.state.global_step;
        let written = self
            .begin(step, tensors.critic.is_some())
            .and_then(|()| self.write_part(step, Place::ALONE, tensors))
            .and_then(|files| self.publish(files, head));
        if written.is_err() {
            self.discard(step);
        }
        written
    }

    /// Makes the temporary folder of a step, in place of an older one.
    pub fn begin(&self, step: u32, has_critic: bool) -> Result<(), CheckpointError> {
        let temporary = self.temporary(step);
        if temporary.exists() {
            self.storage
                .remove_dir_all(&temporary)
                .map_err(at("remove", &temporary))?;
        }
        let folders = folders(&temporary, has_critic);
        folders
            .iter()
            .try_for_each(|folder| self.storage.create_dir(folder).map_err(at("create", folder)))
    }

    /// Writes and syncs what a rank has of the tensors.
    pub fn write_part(
        &self,
        step: u32,
        place: Place,
        tensors: &SavedTensors,
    ) -> Result<Vec<FileRecord>, CheckpointError> {
        let temporary = self.temporary(step);
        let mut files = vec![(OPTIMIZER, &tensors.optimizer), (ACTOR, &tensors.actor)];
        if let Some(critic) = &tensors.critic {
            files.extend([(CRITIC, &critic.weights), (CRITIC_OPTIMIZER, &critic.optimizer)]);
        }
        let write = |(stem, pieces): (&str, &Vec<TensorPiece>)| {
            let name = place.file_name(stem);
            // Of an attempt that rank 0 did not wait for any longer.
            let path = temporary.join(&name);
            if path.exists() {
                self.storage.remove_file(&path).map_err(at("remove", &path))?;
            }
            self.write_file(&temporary, &name, &|out| write_pieces(out, pieces))
        };
        files.into_iter().map(write).collect()
    }

    /// Adds state and export to what all ranks have written, and publishes the checkpoint: when this returns,
    /// it survives a power cut.
    pub fn publish(
        &self,
        parts: Vec<FileRecord>,
        head: &CheckpointHead,
    ) -> Result<CommittedCheckpoint, CheckpointError> {
        let step = head.state.global_step;
        let temporary = self.temporary(step);
        let mut files = self.write_head(&temporary, &parts, head)?;
        files.extend(parts);

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
            .rename(&temporary, &folder)
            .map_err(at("rename", &temporary))?;
        self.storage
            .sync_dir(&self.root)
            .map_err(at("sync", &self.root))?;

        let marker = Marker::new(step, files);
        self.replace_file(&folder.join(MARKER), &to_json(&marker, &folder)?)?;
        // Published. What follows may fail without harm: readers go by markers, not by this file.
        self.replace_file(&self.root.join(LATEST), step.to_string().as_bytes())?;
        if replaced {
            self.storage.remove_dir_all(&old).map_err(at("remove", &old))?;
        }
        Ok(CommittedCheckpoint {
            step,
            path: folder,
            size_bytes: marker.size_bytes(),
        })
    }

    /// Removes what was written of a step that cannot be published.
    pub fn discard(&self, step: u32) {
        let temporary = self.temporary(step);
        if !temporary.exists() {
            return;
        }
        if let Err(error) = self.storage.remove_dir_all(&temporary) {
            tracing::warn!(path = %temporary.display(), %error, "cannot remove an unfinished checkpoint");
        }
    }

    /// Writes and syncs everything but the ranks' tensors, whose files it looks at.
    fn write_head(
        &self,
        temporary: &Path,
        parts: &[FileRecord],
        head: &CheckpointHead,
    ) -> Result<Vec<FileRecord>, CheckpointError> {
        for part in parts {
            check_arrived(temporary, part)?;
        }
        let damaged = |problem: String| CheckpointError::Damaged {
            path: temporary.to_owned(),
            problem,
        };
        // What is published can be loaded: the pieces of all ranks make whole tensors.
        for stem in [OPTIMIZER, CRITIC, CRITIC_OPTIMIZER] {
            let pieces = read_part(temporary, parts, stem)?;
            PieceIndex::new(&pieces).map_err(|e| damaged(e.to_string()))?;
        }
        let actor = read_part(temporary, parts, ACTOR)?;
        let actor = PieceIndex::new(&actor).map_err(|e| damaged(e.to_string()))?;
        if let Some(problem) = head.export.problem(&actor) {
            return Err(damaged(problem));
        }

        let mut files = Vec::new();
        let mut put = |name: &str, write: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
            files.push(self.write_file(temporary, name, write)?);
            Ok::<(), CheckpointError>(())
        };
        let config = &head.model_files.config;
        put("actor/config.json", &|out| out.write_all(config))?;
        put("huggingface/config.json", &|out| out.write_all(config))?;
        let exported = head.export.files();
        for file in &exported {
            put(&format!("huggingface/{}", file.name), &|out| {
                file.write(out, &actor)
            })?;
        }
        if exported.len() > 1 {
            let index = to_json(&export::index(&exported), temporary)?;
            put("huggingface/model.safetensors.index.json", &|out| {
                out.write_all(&index)
            })?;
        }
        for (name, bytes) in &head.model_files.others {
            put(&format!("huggingface/{name}"), &|out| out.write_all(bytes))?;
        }
        let state = to_json(&head.state, temporary)?;
        put("state.json", &|out| out.write_all(&state))?;
        let has_critic = temporary.join("critic").exists();
        for folder in folders(temporary, has_critic).iter().rev() {
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
        write_recorded(&mut *file, name, &path, write)
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

    /// Maps the tensors of a published checkpoint, as [`CheckpointStore::latest_committed`] returned it. The
    /// files are those that its marker names; their contents are not checked again.
    pub fn load(&self, checkpoint: &CommittedCheckpoint) -> Result<LoadedCheckpoint, CheckpointError> {
        let path = &checkpoint.path;
        let marker = Marker::read(path, checkpoint.step).map_err(|problem| CheckpointError::Damaged {
            path: path.clone(),
            problem,
        })?;
        let read = |stem| read_part(path, &marker.files, stem);
        let has_critic = marker.files.iter().any(|file| is_part(&file.path, CRITIC));
        let critic = || -> Result<CriticState, CheckpointError> {
            Ok(CriticState {
                weights: read(CRITIC)?,
                optimizer: read(CRITIC_OPTIMIZER)?,
            })
        };
        Ok(LoadedCheckpoint {
            tensors: SavedTensors {
                actor: read(ACTOR)?,
                optimizer: read(OPTIMIZER)?,
                critic: has_critic.then(critic).transpose()?,
            },
            state: self.load_state(checkpoint)?,
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

    fn temporary(&self, step: u32) -> PathBuf {
        self.aside(step, "tmp")
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

/// Which of the ranks that save together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 0.
    pub index: usize,
    /// Ranks.
    pub of: usize,
}

impl Place {
    /// One rank has everything.
    pub const ALONE: Place = Place { index: 0, of: 1 };

    /// Name of this rank's file.
    fn file_name(self, stem: &str) -> String {
        match self {
            Place::ALONE => format!("{stem}{ENDING}"),
            Place { index, of } => format!("{stem}-rank-{:05}-of-{of:05}{ENDING}", index + 1),
        }
    }
}

/// Whether a file belongs to the parts that all ranks wrote under this stem.
fn is_part(path: &str, stem: &str) -> bool {
    let rest = path.strip_prefix(stem).and_then(|rest| rest.strip_suffix(ENDING));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("-rank-"))
}

/// The pieces of all ranks.
fn read_part(folder: &Path, files: &[FileRecord], stem: &str) -> Result<Vec<TensorPiece>, CheckpointError> {
    let mut pieces = Vec::new();
    for file in files.iter().filter(|file| is_part(&file.path, stem)) {
        pieces.extend(read_pieces(&folder.join(&file.path))?);
    }
    Ok(pieces)
}

/// Whether a file that a rank has written is there for this one.
fn check_arrived(folder: &Path, part: &FileRecord) -> Result<(), CheckpointError> {
    let path = folder.join(&part.path);
    let problem = match fs::metadata(&path) {
        Ok(found) if found.len() == part.size => return Ok(()),
        Ok(found) => format!(
            "the rank that wrote it reports {} bytes, and rank 0 sees {}",
            part.size,
            found.len()
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            "the rank that wrote it reports success, and rank 0 does not see it".to_owned()
        }
        Err(source) => return Err(at("look at", &path)(source)),
    };
    Err(CheckpointError::Damaged {
        path,
        problem: format!("{problem}: CKPTS_DIR must be on a file system that all nodes share"),
    })
}

fn folders(root: &Path, has_critic: bool) -> Vec<PathBuf> {
    let mut folders = vec![root.to_owned(), root.join("actor"), root.join("huggingface")];
    folders.extend(has_critic.then(|| root.join("critic")));
    folders
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
