//! Checkpoints of several ranks through the disk: written by any number of them, read by any other; what a rank
//! holds meanwhile; a rank that dies in the middle; transformers as a reader of the export.

use super::{
    curve::logits_agree,
    families::load,
    ranks::{
        as_rank, assert_done, everything, is_rank_of, mesh, mpirun, on_threads, two_steps, Plan, FOLDER, FSDP,
    },
    *,
};
use crate::{
    comm::Communicator,
    model::hf::{stored_layout, Checkpoint},
    train::checkpoint::{
        CheckpointHead, CheckpointStore, CheckpointWriter, DiskStorage, ExportLayout, ModelFiles,
        PartInboxes, PartWriter, PieceIndex, Place, RunState, Save, SavedTensors, Storage, StoredFile,
        WriteReport,
    },
};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};

const WAIT: Duration = Duration::from_secs(60);

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(family)
}

/// What rank 0 adds: the export in the layout of `source`, in files of at most so many bytes.
fn head(source: &Path, state: &TrainerSnapshot, max_file_bytes: usize) -> CheckpointHead {
    let config = ModelConfig::from_dir(source).unwrap();
    let layout = stored_layout(&config, &Checkpoint::open(source).unwrap()).unwrap();
    let mut export = ExportLayout::new(layout);
    export.max_file_bytes = max_file_bytes;
    CheckpointHead {
        state: RunState {
            global_step: state.version.0,
            weight_version: state.version,
            trainer: state.progress,
            buffer: serde_json::Value::Null,
            config_fingerprint: String::new(),
        },
        model_files: ModelFiles::read(source).unwrap(),
        export: Arc::new(export),
    }
}

fn tensors(state: TrainerSnapshot) -> SavedTensors {
    SavedTensors {
        actor: state.actor,
        optimizer: state.optimizer,
        critic: state.critic,
    }
}

/// A rank's side of saving, for all saves of its world.
enum Saver {
    Head(CheckpointWriter),
    Other(PartWriter),
}

impl Saver {
    fn open(comm: &Arc<dyn Communicator>, store: CheckpointStore) -> Self {
        let ranks: Vec<u32> = (0..comm.size()).collect();
        let place = Place {
            index: comm.rank() as usize,
            of: ranks.len(),
        };
        match comm.rank() {
            0 => {
                let inboxes = PartInboxes::open(&**comm, &ranks, WAIT).unwrap();
                Self::Head(CheckpointWriter::start(store, None, inboxes).unwrap())
            }
            _ => Self::Other(PartWriter::start(store, comm.clone(), 0, place).unwrap()),
        }
    }

    /// All ranks save; rank 0 returns when it is published.
    fn save(
        &self,
        comm: &Arc<dyn Communicator>,
        trainer: &Trainer,
        source: &Path,
        max_file_bytes: usize,
    ) -> Option<WriteReport> {
        let step = trainer.version().0;
        if let Self::Head(writer) = self {
            assert!(writer.begin(step, trainer.has_critic()));
        }
        comm.barrier("the folder is there", WAIT).unwrap();
        let report = match self {
            Self::Other(writer) => {
                let snapshot = || Ok::<_, TrainError>(tensors(trainer.save_state()?));
                writer.save(u64::from(step), step, snapshot).unwrap();
                None
            }
            Self::Head(writer) => {
                let state = trainer.save_state().unwrap();
                let save = Save {
                    number: u64::from(step),
                    head: head(source, &state, max_file_bytes),
                    tensors: tensors(state),
                };
                writer.submit(save, WAIT).unwrap();
                writer.drain(WAIT).unwrap().pop()
            }
        };
        comm.barrier("the checkpoint is written", WAIT).unwrap();
        report
    }
}

/// A trainer at its start, or this rank's part of it.
fn fresh(family: &str, config: &TrainerConfig, mesh: Option<Arc<Mesh>>) -> Trainer {
    tch::set_num_threads(1);
    let load = || match &mesh {
        None => load(family),
        Some(mesh) => Policy::load_parts(&fixture(family), Device::Cpu, |spec, t| {
            mesh.share(&spec.name, &t)
        })
        .unwrap(),
    };
    let reference = Some(load());
    Trainer::over_ranks(config.clone(), load(), reference, mesh.clone())
        .unwrap()
        .with_critic(load())
}

/// The newest checkpoint of a folder, in a trainer.
fn resume(root: &Path, trainer: &mut Trainer) {
    let store = CheckpointStore::open(root).unwrap();
    let found = store.latest_committed().unwrap().checkpoint.unwrap();
    let loaded = store.load(&found).unwrap();
    let (tensors, state) = (&loaded.tensors, &loaded.state);
    trainer
        .load_state(
            &tensors.actor,
            &tensors.optimizer,
            tensors.critic.as_ref(),
            state.trainer,
            state.weight_version,
        )
        .unwrap();
}

/// Every whole tensor of the newest checkpoint by list and name: shape and bytes.
fn whole(root: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let store = CheckpointStore::open(root).unwrap();
    let found = store.latest_committed().unwrap().checkpoint.unwrap();
    let loaded = store.load(&found).unwrap().tensors;
    let critic = loaded.critic.unwrap();
    let mut all = BTreeMap::new();
    for (list, pieces) in [
        ("actor", &loaded.actor),
        ("optimizer", &loaded.optimizer),
        ("critic", &critic.weights),
        ("critic optimizer", &critic.optimizer),
    ] {
        let index = PieceIndex::new(pieces).unwrap();
        for name in index.names() {
            let shape = index.shape(name).unwrap().to_vec();
            let numel = shape.iter().product();
            let bytes = index.bytes(name, 0..numel).flatten().copied().collect();
            all.insert(format!("{list} {name}"), (shape, bytes));
        }
    }
    all
}

fn third() -> TrainBatch {
    TrainBatch {
        step: 3,
        ..batch(23, 4)
    }
}

#[track_caller]
fn same(a: &StepMetrics, b: &StepMetrics) {
    for key in [
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "critic/vf_loss",
        "critic/grad_norm",
    ] {
        let (a, b) = (a.get(key).unwrap(), b.get(key).unwrap());
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{key}: {a} {b}");
    }
}

/// Makes two steps, saves them, checks the weights against what the ranks gather, and makes a third step.
fn save_and_go_on(
    comm: &Arc<dyn Communicator>,
    plan: Plan,
    family: &str,
    root: &Path,
) -> (StepMetrics, TrainerSnapshot, Option<Arc<Mesh>>) {
    let config = everything();
    let mesh = (comm.size() > 1).then(|| mesh(comm, plan));
    let (_, mut trainer) = two_steps(family, &config, mesh.clone());
    let store = CheckpointStore::open(root).unwrap();
    let saver = Saver::open(comm, store);
    let report = saver.save(comm, &trainer, &fixture(family), 20_000);
    if comm.rank() == 0 {
        let published = report.unwrap().result.unwrap();
        let gathered = trainer.export_weights().unwrap();
        let saved = whole(root);
        for tensor in &gathered {
            let (shape, bytes) = &saved[&format!("actor {}", tensor.name)];
            assert_eq!(
                (shape, &bytes[..]),
                (&tensor.shape, &tensor.data[..]),
                "{}",
                tensor.name
            );
        }
        let exported = Policy::load(&published.path.join("huggingface"), Device::Cpu).unwrap();
        for (a, b) in exported.export().iter().zip(&gathered) {
            assert_eq!((&a.name, &a.data), (&b.name, &b.data), "the export");
        }
    } else {
        trainer.assist_export().unwrap();
    }
    let metrics = trainer.step(&third()).unwrap();
    (metrics, trainer.save_state().unwrap(), mesh)
}

fn bytes(state: &TrainerSnapshot) -> Vec<(String, usize, bytes::Bytes)> {
    let critic = state.critic.as_ref().unwrap();
    let lists = [&state.actor, &state.optimizer, &critic.weights, &critic.optimizer];
    let pieces = lists.into_iter().flatten();
    pieces
        .map(|t| (t.name.clone(), t.offset, t.data.clone()))
        .collect()
}

const fn plan(sequence: u32, experts: u32) -> Plan {
    Plan { sequence, experts }
}

/// Saved by 1, 2 and 4 ranks, with shared sequences and experts, and read by 1, 2 and 4 under other plans: every
/// bit of weights and moments is the same, and so is the next step.
fn moves_between(family: &str, savers: &[(u32, Plan)], readers: &[(u32, Plan)]) {
    for (ranks, saver_plan) in savers {
        let root = tempfile::tempdir().unwrap();
        let went_on = on_threads(*ranks, |comm| {
            let (metrics, state, _) = save_and_go_on(&comm, *saver_plan, family, root.path());
            (metrics, bytes(&state))
        });
        let saved = whole(root.path());
        for (readers, reader_plan) in readers {
            let again = tempfile::tempdir().unwrap();
            let resumed = on_threads(*readers, |comm| {
                let mesh = (*readers > 1).then(|| mesh(&comm, *reader_plan));
                let mut trainer = fresh(family, &everything(), mesh);
                resume(root.path(), &mut trainer);
                let store = CheckpointStore::open(again.path()).unwrap();
                let report = Saver::open(&comm, store).save(&comm, &trainer, &fixture(family), usize::MAX);
                if let Some(report) = report {
                    report.result.unwrap();
                }
                let metrics = trainer.step(&third()).unwrap();
                (metrics, bytes(&trainer.save_state().unwrap()))
            });
            let text = format!("{family}: {ranks} ranks {saver_plan:?}, read by {readers} {reader_plan:?}");
            assert!(whole(again.path()) == saved, "{text}: other bits");
            resumed
                .iter()
                .for_each(|(metrics, _)| same(metrics, &went_on[0].0));
            if (ranks, saver_plan) == (readers, reader_plan) {
                let states = resumed.iter().zip(&went_on);
                states.for_each(|(a, b)| assert!(a.1 == b.1, "{text}: the next step has other bits"));
            }
            println!("{text}: {} tensors alike", saved.len());
        }
    }
}

#[test]
fn states_move_between_numbers_of_ranks() {
    let all = [(1, FSDP), (2, plan(2, 1)), (2, plan(1, 2)), (4, plan(2, 4))];
    moves_between("qwen3_moe", &all, &all);
}

#[test]
fn states_of_a_hybrid_move_between_numbers_of_ranks() {
    let readers = [(1, FSDP), (2, FSDP), (4, plan(4, 2))];
    moves_between("qwen3_5_moe", &[(4, plan(4, 2))], &readers);
    moves_between("qwen3_untied_bias", &[(2, FSDP)], &[(1, FSDP), (4, plan(2, 1))]);
}

#[test]
fn a_state_with_a_hole_is_refused_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let parts = on_threads(2, |comm| {
        let (_, state, _) = save_and_go_on(&comm, FSDP, "qwen3", root.path());
        state
    });
    let mut trainer = fresh("qwen3", &everything(), None);
    let before = bytes(&trainer.save_state().unwrap());
    let both = |list: fn(&TrainerSnapshot) -> &Vec<TensorPiece>| -> Vec<TensorPiece> {
        parts.iter().flat_map(|part| list(part).clone()).collect()
    };
    let (actor, mut optimizer) = (both(|p| &p.actor), both(|p| &p.optimizer));
    let critic = crate::train::checkpoint::CriticState {
        weights: both(|p| &p.critic.as_ref().unwrap().weights),
        optimizer: both(|p| &p.critic.as_ref().unwrap().optimizer),
    };
    let lost = optimizer.pop().unwrap();
    let mut resume = |optimizer: &[TensorPiece]| {
        trainer.load_state(
            &actor,
            optimizer,
            Some(&critic),
            parts[0].progress,
            parts[0].version,
        )
    };
    let error = resume(&optimizer).unwrap_err().to_string();
    assert!(
        error.contains(&lost.name) && error.contains("written by no rank"),
        "{error}"
    );
    optimizer.push(lost);
    resume(&optimizer).unwrap();
    assert!(bytes(&trainer.save_state().unwrap()) != before);
}

#[test]
fn mpi_four_ranks_save_and_go_on() {
    let test = "saved::mpi_four_ranks_save_and_go_on";
    if !is_rank_of(test) {
        let root = tempfile::tempdir().unwrap();
        assert_done(&mpirun(test, 4, Some(root.path())), 4);
        return;
    }
    let root = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    as_rank(4, |comm| {
        let family = "qwen3_moe";
        let (metrics, state, mesh) = save_and_go_on(comm, plan(2, 4), family, &root);
        let mut trainer = fresh(family, &everything(), mesh);
        resume(&root, &mut trainer);
        same(&trainer.step(&third()).unwrap(), &metrics);
        assert!(
            bytes(&trainer.save_state().unwrap()) == bytes(&state),
            "the next step has other bits"
        );
        if comm.rank() == 0 {
            let mut alone = fresh(family, &everything(), None);
            resume(&root, &mut alone);
            same(&alone.step(&third()).unwrap(), &metrics);
        }
        comm.barrier("rank 0 alone is done", WAIT).unwrap();
    });
}

/// Kills this process at its third file.
struct Dying(AtomicUsize);

impl Storage for Dying {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DiskStorage.create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        if self.0.fetch_add(1, Ordering::SeqCst) == 2 {
            // SAFETY: a plain system call on this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        DiskStorage.create_file(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        DiskStorage.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        DiskStorage.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        DiskStorage.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        DiskStorage.remove_dir_all(path)
    }
}

#[test]
fn mpi_a_rank_killed_in_its_write_leaves_the_older_checkpoint() {
    let test = "saved::mpi_a_rank_killed_in_its_write_leaves_the_older_checkpoint";
    if !is_rank_of(test) {
        let root = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(root.path()).unwrap();
        let mut trainer = fresh("qwen3", &everything(), None);
        let mut first = batch(23, 4);
        first.step = 1;
        trainer.step(&first).unwrap();
        let state = trainer.save_state().unwrap();
        let head = head(&fixture("qwen3"), &state, usize::MAX);
        store.write(&tensors(state), &head).unwrap();
        let before = whole(root.path());
        let output = mpirun(test, 2, Some(root.path()));
        assert!(!output.status.success(), "the world ends with its rank");
        assert!(
            root.path().join("global_step_2.tmp").is_dir(),
            "it died in the middle of step 2"
        );
        let found = store.latest_committed().unwrap();
        assert_eq!(found.checkpoint.unwrap().step, 1);
        assert!(whole(root.path()) == before);
        return;
    }
    let root = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    as_rank(2, |comm| {
        let (_, trainer) = two_steps("qwen3", &everything(), Some(mesh(comm, FSDP)));
        let store = match comm.rank() {
            0 => CheckpointStore::open(&root).unwrap(),
            _ => CheckpointStore::with_storage(&root, Arc::new(Dying(AtomicUsize::new(0)))),
        };
        Saver::open(comm, store).save(comm, &trainer, &fixture("qwen3"), usize::MAX);
    });
}

/// Bytes of this process that are in memory and not pages of a file.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().unwrap();
    kib << 10
}

/// By how much memory grows at most while `work` runs.
fn growth(work: impl FnOnce()) -> usize {
    // Memory that was freed and kept for later would be used again unseen.
    // SAFETY: gives unused pages back to the system; touches no memory in use.
    unsafe { libc::malloc_trim(0) };
    let (before, stop) = (resident_bytes(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let peak = scope.spawn(|| {
            let mut peak = before;
            while !stop.load(Ordering::Relaxed) {
                peak = peak.max(resident_bytes());
                std::thread::sleep(Duration::from_micros(200));
            }
            peak
        });
        work();
        stop.store(true, Ordering::Relaxed);
        peak.join().unwrap() - before
    })
}

/// A dense policy of 72 MB with two large tensors and one optimizer.
fn large(folder: &Path) {
    let mut config = ModelConfig::qwen3(30_000, 256, 512, 4, 4, 2, 64);
    config.tie_word_embeddings = false;
    let policy = Policy::random(config.clone(), 1, Device::Cpu);
    crate::model::hf::save_folder(folder, &config, &policy.export(), None).unwrap();
}

/// Resident bytes of each of two processes while it saves and loads: its snapshot, and for loading nothing that
/// grows with the model.
#[test]
fn mpi_a_rank_holds_its_shares_and_no_whole_tensor() {
    let test = "saved::mpi_a_rank_holds_its_shares_and_no_whole_tensor";
    if !is_rank_of(test) {
        let root = tempfile::tempdir().unwrap();
        large(&root.path().join("policy"));
        assert_done(&mpirun(test, 2, Some(root.path())), 2);
        return;
    }
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let (source, root) = (folder.join("policy"), folder.join("checkpoints"));
    as_rank(2, |comm| {
        let mesh = mesh(comm, FSDP);
        let load = || {
            let share = |spec: &crate::model::hf::TensorSpec, t: Tensor| mesh.share(&spec.name, &t);
            let policy = Policy::load_parts(&source, Device::Cpu, share).unwrap();
            Trainer::over_ranks(config(), policy, None, Some(mesh.clone())).unwrap()
        };
        let mut trainer = load();
        trainer.version = PolicyVersion(1);
        let shares = trainer.memory().shares;
        let store = CheckpointStore::open(&root).unwrap();
        let saver = Saver::open(comm, store);
        let saved = growth(|| {
            let report = saver.save(comm, &trainer, &source, 20_000_000);
            if let Some(report) = report {
                report.result.unwrap();
            }
        });
        let loaded = growth(|| resume(&root, &mut trainer));
        println!(
            "rank {}: shares of {shares} bytes; saving holds {saved} more ({:.2} of weights and moments), loading \
             {loaded} more",
            comm.rank(),
            saved as f64 / (3.0 * shares as f64)
        );
        const SLACK: usize = 12 << 20;
        assert!(saved >= shares, "the snapshot is a copy: {saved}");
        assert!(saved <= 3 * shares + SLACK, "{saved} for shares of {shares}");
        assert!(loaded <= SLACK, "{loaded} for shares of {shares}");
        comm.barrier("both have measured", WAIT).unwrap();
    });
}

/// The export of two ranks in several files, both layouts of experts, and tensors that are not the network's.
#[test]
fn transformers_loads_the_export_of_several_ranks() {
    for family in [
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe_stacked",
    ] {
        let root = tempfile::tempdir().unwrap();
        on_threads(2, |comm| {
            let (_, trainer) = two_steps(family, &everything(), Some(mesh(&comm, FSDP)));
            let saver = Saver::open(&comm, CheckpointStore::open(root.path()).unwrap());
            let report = saver.save(&comm, &trainer, &fixture(family), 30_000);
            if let Some(report) = report {
                report.result.unwrap();
            }
        });
        let folder = root.path().join("global_step_2/huggingface");
        let files = std::fs::read_dir(&folder).unwrap().flatten();
        let weights = files.filter(|f| f.file_name().to_string_lossy().ends_with(".safetensors"));
        let count = weights.count();
        assert!(
            count > 2 && folder.join("model.safetensors.index.json").is_file(),
            "{count}"
        );
        let policy = Policy::load(&folder, Device::Cpu).unwrap();
        let source = Checkpoint::open(&fixture(family)).unwrap();
        let written = Checkpoint::open(&folder).unwrap();
        assert_eq!(
            written.names().collect::<Vec<_>>(),
            source.names().collect::<Vec<_>>()
        );
        for (name, _) in source.others(&policy.config) {
            let (a, b) = (source.get_any(name).unwrap(), written.get_any(name).unwrap());
            assert_eq!((a.dtype, &a.data), (b.dtype, &b.data), "{name}");
        }
        let out = root.path().join("logits.safetensors");
        if logits_agree(family, &folder, &policy, &out).is_none() {
            return;
        }
        println!("{family}: transformers loads {count} files");
    }
}
