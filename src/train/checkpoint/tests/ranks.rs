//! Checkpoints of several ranks: threads of this process that write parts of the same folder.

use super::*;
use crate::comm::inprocess;
use std::sync::Barrier;

const WAIT: Duration = Duration::from_secs(60);

/// What a rank has of a tensor with these numbers, cut into equal shares.
fn share(name: &str, shape: &[usize], values: &[f32], place: Place) -> Option<TensorPiece> {
    let size = values.len().div_ceil(place.of);
    let start = (place.index * size).min(values.len());
    let own = &values[start..(start + size).min(values.len())];
    (!own.is_empty()).then(|| TensorPiece {
        shape: shape.to_vec(),
        offset: start,
        ..tensor(name, own)
    })
}

/// Numbers that differ by tensor and step.
fn values(name: &str, step: u32, count: usize) -> Vec<f32> {
    let seed = name.len() as f32 + step as f32 / 8.0;
    (0..count).map(|n| seed + n as f32 * 1000.0).collect()
}

/// Name and shape: more numbers than ranks, fewer than ranks, and a row that no number of ranks divides.
const TENSORS: [(&str, &[usize]); 3] = [("embed", &[5, 7]), ("norm", &[3]), ("experts", &[4, 3, 2])];

fn part(step: u32, place: Place) -> SavedTensors {
    let shares = |prefix: &str| -> Vec<TensorPiece> {
        let own = |(name, shape): &(&str, &[usize])| {
            let name = format!("{prefix}{name}");
            share(&name, shape, &values(&name, step, shape.iter().product()), place)
        };
        TENSORS.iter().filter_map(own).collect()
    };
    SavedTensors {
        actor: shares(""),
        optimizer: shares("exp_avg."),
        critic: Some(CriticState {
            weights: shares("critic."),
            optimizer: shares("exp_avg.critic."),
        }),
    }
}

/// Experts one by one, two at a time, and a file limit that makes several files.
fn head_of(step: u32) -> CheckpointHead {
    let mut all = vec![
        exported("embed", &[5, 7], "embed", 0),
        exported("norm", &[3], "norm", 0),
    ];
    all.extend((0..4).map(|e| exported(&format!("experts.{e}"), &[3, 2], "experts", e * 6)));
    all.extend(head(step).export.tensors[2..].iter().cloned());
    let mut export = ExportLayout::new(all);
    export.max_file_bytes = 60;
    CheckpointHead {
        export: Arc::new(export),
        ..head(step)
    }
}

/// Saves steps with `ranks` ranks, of which `storage` gives the disk; returns the reports.
fn save(
    root: &Path,
    ranks: u32,
    steps: &[u32],
    timeout: Duration,
    storage: impl Fn(u32, u32) -> Option<Arc<dyn Storage>> + Sync,
) -> Vec<WriteReport> {
    let store = |rank, step| match storage(rank, step) {
        Some(storage) => CheckpointStore::with_storage(root, storage),
        None => CheckpointStore::open(root).unwrap(),
    };
    let world: Vec<u32> = (0..ranks).collect();
    // An order of rank 0, and the end of a save.
    let turn = Barrier::new(ranks as usize);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for comm in inprocess::world(ranks) {
            let (store, world, turn) = (&store, &world, &turn);
            threads.push(scope.spawn(move || {
                let rank = comm.rank();
                let place = Place {
                    index: rank as usize,
                    of: ranks as usize,
                };
                if rank > 0 {
                    for (number, step) in steps.iter().enumerate() {
                        turn.wait();
                        let writer = PartWriter::start(store(rank, *step), comm.clone(), 0, place).unwrap();
                        let snapshot = || Ok::<_, ()>(part(*step, place));
                        writer.save(number as u64, *step, snapshot).unwrap();
                        turn.wait();
                        writer.finish(WAIT).unwrap();
                    }
                    return Vec::new();
                }
                let inboxes = PartInboxes::open(&*comm, world, timeout).unwrap();
                let writer = CheckpointWriter::start(store(0, steps[0]), None, inboxes).unwrap();
                let mut reports = Vec::new();
                for (number, step) in steps.iter().enumerate() {
                    writer.ready(WAIT).unwrap();
                    assert!(writer.begin(*step, true));
                    turn.wait();
                    let save = Save {
                        number: number as u64,
                        tensors: part(*step, place),
                        head: head_of(*step),
                    };
                    writer.submit(save, WAIT).unwrap();
                    reports.extend(writer.drain(WAIT).unwrap());
                    turn.wait();
                }
                reports
            }));
        }
        let reports = threads.into_iter().flat_map(|thread| thread.join().unwrap());
        reports.collect()
    })
}

fn disk(_: u32, _: u32) -> Option<Arc<dyn Storage>> {
    None
}

/// The whole tensors of a checkpoint are those that were saved.
fn check(root: &Path, step: u32) {
    let store = CheckpointStore::open(root).unwrap();
    let found = store.latest_committed().unwrap().checkpoint.unwrap();
    assert_eq!(found.step, step);
    let loaded = store.load(&found).unwrap();
    let critic = loaded.tensors.critic.unwrap();
    let parts = [
        ("", &loaded.tensors.actor),
        ("exp_avg.", &loaded.tensors.optimizer),
        ("critic.", &critic.weights),
        ("exp_avg.critic.", &critic.optimizer),
    ];
    for (prefix, pieces) in parts {
        let index = PieceIndex::new(pieces).unwrap();
        assert_eq!(index.names().count(), TENSORS.len());
        for (name, shape) in TENSORS {
            let name = format!("{prefix}{name}");
            let count = shape.iter().product();
            let want: Vec<u8> = tensor("", &values(&name, step, count)).data.to_vec();
            assert_eq!(index.shape(&name), Some(shape));
            assert_eq!(
                index
                    .bytes(&name, 0..count)
                    .flatten()
                    .copied()
                    .collect::<Vec<_>>(),
                want,
                "{name}"
            );
        }
    }
    assert_eq!(loaded.state, head(step).state);
    // The export, whatever the ranks were: whole tensors in several files, found by the index.
    let folder = crate::model::hf::Checkpoint::open(&found.path.join("huggingface")).unwrap();
    let experts = values("experts", step, 24);
    for expert in 0..4 {
        let got = folder.get(&format!("experts.{expert}"), &[3, 2]).unwrap();
        assert_eq!(got.data, tensor("", &experts[expert * 6..][..6]).data);
    }
    assert_eq!(
        folder.get("embed", &[5, 7]).unwrap().data,
        tensor("", &values("embed", step, 35)).data
    );
    assert_eq!(
        folder.get("visual.weight", &[1, 3]).unwrap().data[..],
        [1, 2, 3, 4, 5, 6]
    );
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn every_rank_writes_its_pieces_and_whole_tensors_are_read() {
    for ranks in [1, 2, 4, 5] {
        let root = tempfile::tempdir().unwrap();
        let reports = save(root.path(), ranks, &[2, 3], WAIT, disk);
        assert!(reports.iter().all(|report| report.result.is_ok()), "{reports:?}");
        check(root.path(), 3);
        let folder = root.path().join("global_step_3");
        let actor = names(&folder.join("actor"));
        if ranks == 1 {
            assert_eq!(actor, ["config.json", "model.safetensors"]);
        } else {
            assert_eq!(actor.len(), ranks as usize + 1);
            assert_eq!(actor[1], format!("model-rank-00001-of-{ranks:05}.safetensors"));
        }
        assert_eq!(
            names(&folder.join("huggingface")),
            [
                "config.json",
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
            ]
        );
        // A rank that trains alone has everything in whole tensors, as other programs read them.
        let first = std::fs::read(folder.join("actor").join(&actor[1])).unwrap();
        let first = safetensors::SafeTensors::deserialize(&first).unwrap();
        let shape = first.tensor("experts").unwrap().shape().to_vec();
        assert_eq!(shape.len(), if ranks == 1 { 3 } else { 1 });
    }
}

/// A full disk on one rank, at every operation, on the first and on another rank.
#[test]
fn a_rank_that_cannot_write_is_named_and_the_older_checkpoint_stays() {
    for rank in [0, 2] {
        for at in [0, 3, 6, 7, 13, 20] {
            let root = tempfile::tempdir().unwrap();
            assert!(save(root.path(), 3, &[2], WAIT, disk)[0].result.is_ok());
            let calls = Arc::new(AtomicUsize::new(0));
            let storage = |of: u32, _| -> Option<Arc<dyn Storage>> {
                (of == rank).then(|| {
                    let storage = Faulty {
                        disk: DiskStorage,
                        calls: calls.clone(),
                        // Rank 0 makes the folders first, which is another error.
                        at: at + if rank == 0 { 4 } else { 0 },
                        kill: false,
                        error: libc::ENOSPC,
                    };
                    Arc::new(storage) as Arc<dyn Storage>
                })
            };
            let report = save(root.path(), 3, &[4], WAIT, storage).remove(0);
            let error = report.result.unwrap_err();
            assert!(error.is_disk_full(), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("rank {rank} did not write")), "{text}");
            assert!(
                text.contains("MAX_CKPT_TO_KEEP") && text.contains("of-00003"),
                "{text}"
            );
            assert!(report.kept.is_empty());
            check(root.path(), 2);
            assert_eq!(
                names(root.path()),
                ["global_step_2", "latest_checkpointed_iteration.txt"]
            );
            // And the next save succeeds.
            assert!(save(root.path(), 3, &[4], WAIT, disk)[0].result.is_ok());
            check(root.path(), 4);
        }
    }
}

/// A rank that hangs in its write: rank 0 gives up, names it, and takes its late report for nothing.
#[test]
fn a_rank_that_does_not_report_is_named_and_may_come_back() {
    let root = tempfile::tempdir().unwrap();
    assert!(save(root.path(), 2, &[2], WAIT, disk)[0].result.is_ok());
    let comms = inprocess::world(2);
    let inboxes = PartInboxes::open(&*comms[0], &[0, 1], Duration::from_millis(300)).unwrap();
    let open = || CheckpointStore::open(root.path()).unwrap();
    let writer = CheckpointWriter::start(open(), None, inboxes).unwrap();
    let place = |index| Place { index, of: 2 };
    let gate = Arc::new(Barrier::new(2));
    let slow = Slow {
        disk: DiskStorage,
        gate: gate.clone(),
        first: AtomicUsize::new(0),
    };
    let slow = CheckpointStore::with_storage(root.path(), Arc::new(slow));
    let other = PartWriter::start(slow, comms[1].clone(), 0, place(1)).unwrap();
    let save = |number, step: u32| {
        assert!(writer.begin(step, true));
        other
            .save(number, step, || Ok::<_, ()>(part(step, place(1))))
            .unwrap();
        let save = Save {
            number,
            tensors: part(step, place(0)),
            head: head_of(step),
        };
        writer.submit(save, WAIT).unwrap();
        writer.drain(WAIT).unwrap().remove(0)
    };
    let error = save(1, 4).result.unwrap_err();
    assert!(
        matches!(&error, CheckpointError::PartDeadline { ranks, .. } if ranks == &[1]),
        "{error}"
    );
    assert!(
        error.to_string().contains("rank 1 did not report within 0 s"),
        "{error}"
    );
    check(root.path(), 2);
    // It goes on, into a folder that is no more; its report is of a save that is over.
    gate.wait();
    let report = save(2, 4);
    assert!(report.result.is_ok(), "{report:?}");
    check(root.path(), 4);
}

#[test]
fn a_missing_or_damaged_piece_is_named_and_the_older_checkpoint_taken() {
    type Damage = fn(&Path);
    let cases: [(Damage, &str); 3] = [
        (|file| std::fs::remove_file(file).unwrap(), "No such file"),
        (
            |file| {
                let mut bytes = std::fs::read(file).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(file, bytes).unwrap();
            },
            "has checksum",
        ),
        (
            |file| {
                let file = std::fs::File::options().write(true).open(file).unwrap();
                file.set_len(100).unwrap();
            },
            "has 100 bytes",
        ),
    ];
    for file in [
        "actor/model-rank-00002-of-00003.safetensors",
        "optimizer-rank-00003-of-00003.safetensors",
        "critic/optimizer-rank-00001-of-00003.safetensors",
    ] {
        for (damage, message) in cases {
            let root = tempfile::tempdir().unwrap();
            save(root.path(), 3, &[2, 4], WAIT, disk);
            damage(&root.path().join("global_step_4").join(file));
            let store = CheckpointStore::open(root.path()).unwrap();
            let found = store.latest_committed().unwrap();
            let problem = &found.skipped[0].problem;
            assert!(problem.contains(file) && problem.contains(message), "{problem}");
            check(root.path(), 2);
        }
    }
}

/// Nothing is published that cannot be loaded: a rank whose pieces do not belong to those of the others.
#[test]
fn pieces_that_make_no_whole_tensors_are_not_published() {
    let root = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    let place = |index| Place { index, of: 3 };
    let write = |second: Place, drop_third: bool| {
        store.begin(2, true).unwrap();
        let mut files = store.write_part(2, place(0), &part(2, place(0))).unwrap();
        files.extend(store.write_part(2, place(1), &part(2, second)).unwrap());
        files.extend(store.write_part(2, place(2), &part(2, place(2))).unwrap());
        if drop_third {
            std::fs::remove_file(
                root.path()
                    .join("global_step_2.tmp/optimizer-rank-00003-of-00003.safetensors"),
            )
            .unwrap();
        }
        store
            .publish(files, &head_of(2))
            .map_err(|error| error.to_string())
    };
    let error = write(Place { index: 1, of: 4 }, false).unwrap_err();
    assert!(
        error.contains("written by no rank") || error.contains("written by two"),
        "{error}"
    );
    let error = write(place(1), true).unwrap_err();
    assert!(
        error.contains("optimizer-rank-00003") && error.contains("all nodes share"),
        "{error}"
    );
    assert_eq!(store.committed_steps().unwrap(), [0u32; 0]);
    write(place(1), false).unwrap();
    check(root.path(), 2);
}

/// A checkpoint as versions before wrote it: whole tensors, format 1.
#[test]
fn whole_files_of_earlier_versions_are_read() {
    let root = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    write(&store, 5).unwrap();
    let folder = root.path().join("global_step_5");
    let marker = std::fs::read_to_string(folder.join("COMMITTED")).unwrap();
    assert!(marker.contains("\"format\": 1"), "{marker}");
    for file in ["actor/model", "optimizer", "critic/model", "critic/optimizer"] {
        let bytes = std::fs::read(folder.join(format!("{file}.safetensors"))).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(
            header.metadata().as_ref().unwrap().len(),
            1,
            "nothing but `format`"
        );
    }
    assert_eq!(latest_step(root.path()), Some(5));
    // A future format is refused by name.
    std::fs::write(
        folder.join("COMMITTED"),
        marker.replace("\"format\": 1", "\"format\": 3"),
    )
    .unwrap();
    let skipped = store.latest_committed().unwrap().skipped;
    assert!(skipped[0].problem.contains("format 3"), "{skipped:?}");
}

#[test]
fn a_folder_of_pieces_says_where_the_model_is() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 2, &[2], WAIT, disk);
    let actor = root.path().join("global_step_2/actor");
    let error = crate::model::hf::Checkpoint::open(&actor)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("2 trainer ranks") && error.contains("global_step_2/huggingface"),
        "{error}"
    );
}
