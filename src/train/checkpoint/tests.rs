use super::*;
use crate::{
    base::PolicyVersion,
    model::hf::{LayoutSource, LayoutTensor, StoredDType},
};
use bytes::Bytes;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};

mod ranks;

fn tensor(name: &str, values: &[f32]) -> TensorPiece {
    TensorPiece {
        name: name.into(),
        shape: vec![values.len()],
        offset: 0,
        data: values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<_>>()
            .into(),
    }
}

/// A tensor of the export that is one of the network.
fn exported(name: &str, shape: &[usize], from: &str, start: usize) -> LayoutTensor {
    LayoutTensor {
        name: name.into(),
        dtype: StoredDType::F32,
        shape: shape.to_vec(),
        source: LayoutSource::Network {
            tensor: from.into(),
            start,
        },
    }
}

fn tensors(step: u32) -> SavedTensors {
    SavedTensors {
        actor: vec![
            tensor("b.weight", &[step as f32, 2.0]),
            tensor("a.weight", &[-1.5]),
        ],
        optimizer: vec![tensor("exp_avg.b.weight", &[0.25, step as f32])],
        critic: (step % 2 == 1).then(|| CriticState {
            weights: vec![tensor("score.weight", &[step as f32])],
            optimizer: vec![tensor("exp_avg.score.weight", &[0.5])],
        }),
    }
}

fn head(step: u32) -> CheckpointHead {
    let passed_through = LayoutTensor {
        name: "visual.weight".into(),
        dtype: StoredDType::Bf16,
        shape: vec![1, 3],
        source: LayoutSource::Folder(Bytes::from_static(&[1, 2, 3, 4, 5, 6])),
    };
    CheckpointHead {
        export: Arc::new(ExportLayout::new(vec![
            exported("b.weight", &[2], "b.weight", 0),
            exported("a.weight", &[1], "a.weight", 0),
            passed_through,
        ])),
        state: RunState {
            global_step: step,
            weight_version: PolicyVersion(step),
            trainer: TrainerProgress {
                optimizer_updates: u64::from(step) * 2,
                skipped_updates: 1,
                lr: 1e-6,
                critic_updates: 3,
                critic_skipped_updates: 0,
                kl_coefficient: Some(0.1),
            },
            buffer: serde_json::json!({ "cursor": step }),
            config_fingerprint: "abc".into(),
        },
        model_files: ModelFiles {
            config: Bytes::from_static(b"{\"model_type\":\"qwen3\"}"),
            others: vec![("tokenizer.json".into(), Bytes::from_static(b"{}"))],
        },
    }
}

/// Writes a checkpoint of one rank.
fn write(store: &CheckpointStore, step: u32) -> Result<CommittedCheckpoint, CheckpointError> {
    store.write(&tensors(step), &head(step))
}

#[track_caller]
fn assert_same(got: &SavedTensors, want: &SavedTensors) {
    assert_eq!(got.actor, want.actor);
    assert_eq!(got.optimizer, want.optimizer);
    let critic = |t: &SavedTensors| t.critic.clone().map(|c| (c.weights, c.optimizer));
    assert_eq!(critic(got), critic(want));
}

fn latest_step(root: &Path) -> Option<u32> {
    let store = CheckpointStore::open(root).unwrap();
    let found = store.latest_committed().unwrap().checkpoint?;
    // Whatever is called latest must also load, completely.
    let loaded = store.load(&found).unwrap();
    assert_same(&loaded.tensors, &tensors(found.step));
    assert_eq!(loaded.state, head(found.step).state);
    let files = ModelFiles::read(&found.path.join("huggingface")).unwrap();
    assert_eq!(files, head(found.step).model_files);
    Some(found.step)
}

#[test]
fn what_is_written_is_read_back() {
    let root = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    assert_eq!(store.latest_committed().unwrap(), LatestCheckpoint::default());
    let written = write(&store, 12).unwrap();
    assert_eq!(written.path, root.path().join("global_step_12"));
    assert_eq!(latest_step(root.path()), Some(12));
    let with_critic = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(with_critic.path()).unwrap();
    let written_with = write(&store, 13).unwrap();
    assert!(written_with.path.join("critic/model.safetensors").is_file());
    assert!(!written.path.join("critic").exists());
    assert_eq!(latest_step(with_critic.path()), Some(13));
    let latest = std::fs::read_to_string(root.path().join("latest_checkpointed_iteration.txt")).unwrap();
    assert_eq!(latest, "12");
}

#[test]
fn tensor_files_are_read_by_the_safetensors_crate() {
    let root = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    let written = write(&store, 1).unwrap();
    let bytes = std::fs::read(written.path.join("huggingface/model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        file.tensor("b.weight").unwrap().data(),
        [1f32, 2.0].map(f32::to_le_bytes).concat()
    );
    let through = file.tensor("visual.weight").unwrap();
    assert_eq!(
        (through.dtype(), through.shape(), through.data()),
        (safetensors::Dtype::BF16, &[1, 3][..], &[1, 2, 3, 4, 5, 6][..])
    );
}

#[test]
fn damaged_and_unpublished_folders_are_passed_over_by_name() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &str); 5] = [
        (
            "marker gone",
            |p| std::fs::remove_file(p.join("COMMITTED")).unwrap(),
            "never completely written",
        ),
        (
            "marker torn",
            |p| std::fs::write(p.join("COMMITTED"), "{\"format\":").unwrap(),
            "COMMITTED is damaged",
        ),
        (
            "file gone",
            |p| std::fs::remove_file(p.join("state.json")).unwrap(),
            "state.json",
        ),
        (
            "file cut",
            |p| {
                let f = std::fs::File::options()
                    .write(true)
                    .open(p.join("optimizer.safetensors"))
                    .unwrap();
                f.set_len(20).unwrap();
            },
            "optimizer.safetensors has 20 bytes",
        ),
        (
            "byte flipped",
            |p| {
                let file = p.join("actor/model.safetensors");
                let mut bytes = std::fs::read(&file).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(file, bytes).unwrap();
            },
            "actor/model.safetensors has checksum",
        ),
    ];
    for (name, damage, message) in cases {
        let root = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(root.path()).unwrap();
        write(&store, 9).unwrap();
        let newer = write(&store, 10).unwrap();
        damage(&newer.path);
        let found = store.latest_committed().unwrap();
        assert_eq!(found.checkpoint.unwrap().step, 9, "{name}");
        assert_eq!(found.skipped[0].path, newer.path, "{name}");
        assert!(
            found.skipped[0].problem.contains(message),
            "{name}: {:?}",
            found.skipped
        );
        // The same step can be written again in place of the damaged one.
        write(&store, 10).unwrap();
        assert_eq!(latest_step(root.path()), Some(10), "{name}");
    }
}

#[test]
fn retain_keeps_the_newest_and_clears_remains() {
    let root = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    for step in [2, 4, 10, 6] {
        write(&store, step).unwrap();
    }
    std::fs::create_dir(root.path().join("global_step_3.tmp")).unwrap();
    std::fs::create_dir(root.path().join("global_step_5")).unwrap();
    std::fs::create_dir(root.path().join("global_step_99.tmp")).unwrap();
    std::fs::create_dir(root.path().join("other")).unwrap();
    assert_eq!(store.retain(2).unwrap(), [6, 10]);
    let mut left: Vec<_> = std::fs::read_dir(root.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(
        left,
        [
            "global_step_10",
            "global_step_6",
            "global_step_99.tmp",
            "latest_checkpointed_iteration.txt",
            "other"
        ]
    );
    assert_eq!(store.retain(0).unwrap(), [10], "the newest is never deleted");
}

#[test]
fn another_configuration_is_refused() {
    let mut state = head(1).state;
    state.config_fingerprint = "SEED=1\nN_RESP=8\nTRAIN_FILES=/a b.parquet".into();
    let check = |now: &str| state.check_fingerprint(now, Path::new("state.json"));
    assert!(check(&state.config_fingerprint).is_ok());
    let error = check("SEED=1\nN_RESP=4\nTRAIN_FILES=/a c.parquet").unwrap_err();
    let text = error.to_string();
    let told = "N_RESP=8, now 4; TRAIN_FILES=/a b.parquet, now /a c.parquet";
    assert!(text.contains(told) && !text.contains("SEED"), "{text}");
}

/// Fails the operation with number `at`. After a kill, every later one fails too, like for a process
/// that is no more.
struct Faulty {
    disk: DiskStorage,
    calls: Arc<AtomicUsize>,
    at: usize,
    kill: bool,
    error: i32,
}

impl Faulty {
    fn tick(&self) -> io::Result<()> {
        tick(&self.calls, self.at, self.kill, self.error)
    }
}

fn tick(calls: &AtomicUsize, at: usize, kill: bool, error: i32) -> io::Result<()> {
    let call = calls.fetch_add(1, Ordering::SeqCst);
    if call == at || (kill && call > at) {
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok(())
}

struct FaultyFile {
    file: Box<dyn StoredFile>,
    calls: Arc<AtomicUsize>,
    at: usize,
    kill: bool,
    error: i32,
}

impl io::Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = tick(&self.calls, self.at, self.kill, self.error) {
            // Half of the data arrives: a torn write.
            self.file.write_all(&bytes[..bytes.len() / 2])?;
            self.file.flush()?;
            return Err(error);
        }
        self.file.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl StoredFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        tick(&self.calls, self.at, self.kill, self.error)?;
        self.file.sync()
    }
}

impl Storage for Faulty {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.tick()?;
        self.disk.create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        self.tick()?;
        Ok(Box::new(FaultyFile {
            file: self.disk.create_file(path)?,
            calls: self.calls.clone(),
            at: self.at,
            kill: self.kill,
            error: self.error,
        }))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.tick()?;
        self.disk.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.tick()?;
        self.disk.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.tick()?;
        self.disk.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.tick()?;
        self.disk.remove_dir_all(path)
    }
}

fn faulty(root: &Path, at: usize, kill: bool) -> (CheckpointStore, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let storage = Faulty {
        disk: DiskStorage,
        calls: calls.clone(),
        at,
        kill,
        error: libc::ENOSPC,
    };
    (CheckpointStore::with_storage(root, Arc::new(storage)), calls)
}

/// Writes step 4 over a folder that holds step 2 (and, where `rewrite`, an older copy of step 4), stopped
/// at every possible operation. Returns how many operations a full write has.
fn stop_everywhere(kill: bool, rewrite: bool) -> usize {
    for at in 0.. {
        let root = tempfile::tempdir().unwrap();
        let good = CheckpointStore::open(root.path()).unwrap();
        write(&good, 2).unwrap();
        if rewrite {
            write(&good, 4).unwrap();
        }
        let (store, calls) = faulty(root.path(), at, kill);
        let result = write(&store, 4).and_then(|_| store.retain(1));
        let finished = calls.load(Ordering::SeqCst) <= at;
        assert_eq!(result.is_ok(), finished, "operation {at}");
        // An error is reported as what it is.
        if let Err(error) = &result {
            assert!(error.is_disk_full(), "{error}");
        }
        // Always a whole checkpoint, never less than what was there before.
        let latest = latest_step(root.path());
        if rewrite || finished {
            assert_eq!(latest, Some(4), "operation {at}");
        } else {
            assert!(matches!(latest, Some(2 | 4)), "operation {at}: {latest:?}");
        }
        // And the next save succeeds and clears up.
        write(&good, 6).unwrap();
        assert_eq!(good.retain(1).unwrap(), [6]);
        assert_eq!(latest_step(root.path()), Some(6));
        let folders = std::fs::read_dir(root.path()).unwrap().count();
        assert_eq!(folders, 2, "operation {at}: remains were left behind");
        if finished {
            return at;
        }
    }
    unreachable!()
}

#[test]
fn killed_at_every_operation() {
    assert!(stop_everywhere(true, false) > 40);
}

#[test]
fn killed_at_every_operation_while_replacing_the_same_step() {
    stop_everywhere(true, true);
}

#[test]
fn full_disk_at_every_operation() {
    assert!(stop_everywhere(false, false) > 40);
}

#[test]
fn a_real_full_disk_loses_nothing() {
    // A tmpfs of 256 KiB in a mount namespace of this thread alone; needs the right to mount.
    let outcome = std::thread::spawn(|| {
        let root = tempfile::tempdir().unwrap();
        let path = std::ffi::CString::new(root.path().to_str().unwrap()).unwrap();
        // SAFETY: plain system calls on this thread's own namespace with valid C strings.
        let mounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(
                    c"tmpfs".as_ptr(),
                    path.as_ptr(),
                    c"tmpfs".as_ptr(),
                    0,
                    c"size=256k".as_ptr().cast(),
                ) == 0
        };
        if !mounted {
            return false;
        }
        let store = CheckpointStore::open(root.path()).unwrap();
        let writer = CheckpointWriter::start(store, Some(2), PartInboxes::none()).unwrap();
        let save = |tensors: SavedTensors, step| {
            let wait = Duration::from_secs(30);
            assert!(writer.begin(step, tensors.critic.is_some()));
            writer.submit(a_save(tensors, step), wait).unwrap();
            writer.drain(wait).unwrap().remove(0)
        };
        assert!(save(tensors(1), 1).result.is_ok());
        let mut big = tensors(2);
        big.optimizer.push(tensor("exp_avg.big", &vec![0.5; 200_000]));
        let error = save(big, 2).result.unwrap_err();
        assert!(error.is_disk_full(), "{error}");
        assert!(error.to_string().contains("optimizer.safetensors"), "{error}");
        assert!(error.to_string().contains("MAX_CKPT_TO_KEEP"), "{error}");
        assert_eq!(latest_step(root.path()), Some(1));
        let report = save(tensors(3), 3);
        assert!(report.result.is_ok());
        assert_eq!(report.kept, [1, 3]);
        assert_eq!(latest_step(root.path()), Some(3));
        writer.finish(Duration::from_secs(30)).unwrap();
        // SAFETY: unmounts what this thread mounted.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        true
    })
    .join()
    .unwrap();
    if !outcome {
        eprintln!("skipped: no right to mount a tmpfs; the simulated full disk is tested elsewhere");
    }
}

fn a_save(tensors: SavedTensors, step: u32) -> Save {
    Save {
        number: u64::from(step),
        tensors,
        head: head(step),
    }
}

/// Blocks the first file until told to go on.
struct Slow {
    disk: DiskStorage,
    gate: Arc<std::sync::Barrier>,
    first: AtomicUsize,
}

impl Storage for Slow {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        if self.first.fetch_add(1, Ordering::SeqCst) == 0 {
            self.gate.wait();
        }
        self.disk.create_file(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_dir_all(path)
    }
}

#[test]
fn the_writer_works_behind_the_trainer_and_waits_have_deadlines() {
    let root = tempfile::tempdir().unwrap();
    let gate = Arc::new(std::sync::Barrier::new(2));
    let storage = Slow {
        disk: DiskStorage,
        gate: gate.clone(),
        first: AtomicUsize::new(0),
    };
    let store = CheckpointStore::with_storage(root.path(), Arc::new(storage));
    let writer = CheckpointWriter::start(store, None, PartInboxes::none()).unwrap();
    let long = Duration::from_secs(60);
    assert!(writer.begin(1, true) && writer.begin(2, false));
    writer.submit(a_save(tensors(1), 1), long).unwrap();
    let short = Duration::from_millis(20);
    let error = writer.ready(short).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Deadline { step: 1, .. }),
        "{error}"
    );
    // The first write hangs at the gate; one more fits into the queue, a third does not.
    writer.submit(a_save(tensors(2), 2), long).unwrap();
    let error = writer.submit(a_save(tensors(3), 3), short).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Deadline { step: 1, .. }),
        "{error}"
    );
    assert!(writer.reports().is_empty());
    gate.wait();
    let reports = writer.finish(long).unwrap();
    assert_eq!(reports.iter().map(|r| r.step).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(reports[1].kept, [1, 2]);
    assert_eq!(latest_step(root.path()), Some(2));
}

#[test]
fn model_files_need_a_config() {
    let root = tempfile::tempdir().unwrap();
    let error = ModelFiles::read(root.path()).unwrap_err();
    assert!(error.to_string().contains("config.json"));
    std::fs::write(root.path().join("config.json"), "{}").unwrap();
    std::fs::write(root.path().join("chat_template.jinja"), "x").unwrap();
    let files = ModelFiles::read(root.path()).unwrap();
    assert_eq!(
        files.others,
        [("chat_template.jinja".to_owned(), Bytes::from_static(b"x"))]
    );
    let _: PathBuf = root.path().into();
}
