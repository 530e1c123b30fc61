//! The communicator between real MPI processes. Each test starts `mpirun` with this very binary; the
//! processes find the test's name in an environment variable and run its body as a rank.

use bytes::Bytes;
use legorl::base::{
    self, DType, Engine, EngineEvent, GenerateRequest, PolicyVersion, RequestId, SamplingParams, SessionId,
    WeightTarget, WeightTensor, WeightUpdate,
};
use legorl::comm::{launch_world, CommError, Communicator, LaunchKind, Tag, World};
use std::{
    process::{Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use legorl::serve::engine::remote::{EngineServer, RemoteConfig, RemoteEngine, ServerEnd};

#[path = "../../src/serve/engine/remote/double.rs"]
mod double;

const ROLE: &str = "LEGORL_TEST_RANK_OF";
const SOON: Duration = Duration::from_secs(60);

/// Runs `body` on every rank of an `mpirun` of this module's test, and gives the test the output of it; `None` on the ranks.
fn on_mpi(test: &str, ranks: u32, body: impl FnOnce(World)) -> Option<Output> {
    let test = format!("mpi::{test}");
    if std::env::var(ROLE).is_ok_and(|role| role == test) {
        body(launch_world().expect("the ranks find each other"));
        return None;
    }
    let mut command = Command::new("mpirun");
    for (name, _) in std::env::vars_os() {
        // The tests may themselves be a step of a Slurm job.
        let name = name.to_string_lossy().into_owned();
        if ["OMPI_", "PMIX_", "PRTE_", "SLURM_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    let output = command
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            &ranks.to_string(),
            "-x",
            ROLE,
        ])
        .arg(std::env::current_exe().expect("this binary has a path"))
        .args([&test, "--exact", "--nocapture"])
        .env(ROLE, &test)
        .stdin(Stdio::null())
        .output()
        .expect("mpirun starts; it is in the package openmpi-bin");
    Some(output)
}

fn text(output: &Output) -> String {
    format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn succeeded(output: Option<Output>, ranks: usize) {
    let Some(output) = output else { return };
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("rank is done").count(), ranks, "{text}");
}

fn pattern(seed: usize, len: usize) -> Bytes {
    (0..len).map(|i| (i * 7 + seed) as u8).collect::<Vec<u8>>().into()
}

/// Large and small messages cross each other in both directions and keep their order.
fn exchange(comm: &Arc<dyn Communicator>) {
    let peers: Vec<u32> = (0..comm.size()).filter(|r| *r != comm.rank()).collect();
    let sizes = [0usize, 9 << 20, 1, 100_000, 3, 33 << 20, 5000];
    let inboxes: Vec<_> = peers
        .iter()
        .map(|peer| comm.inbox(*peer, Tag::CONTROL).expect("free"))
        .collect();
    for (i, size) in sizes.iter().enumerate() {
        for peer in &peers {
            comm.send(*peer, Tag::CONTROL, pattern(i, *size)).expect("sent");
        }
    }
    for (i, size) in sizes.iter().enumerate() {
        for inbox in &inboxes {
            let message = inbox.recv(SOON).expect("it arrives");
            assert!(
                message == pattern(i, *size),
                "message {i} from rank {}",
                inbox.from()
            );
        }
    }
}

#[test]
fn messages_and_collectives() {
    let output = on_mpi("messages_and_collectives", 3, |world| {
        assert_eq!(world.kind, LaunchKind::Mpi);
        let comm = world.comm.clone();
        assert_eq!(comm.size(), 3);
        comm.barrier("start", SOON).expect("all come");
        exchange(&comm);
        let mut data: Vec<f32> = (0..1_000_003)
            .map(|i| (i % 1000) as f32 * (comm.rank() + 1) as f32)
            .collect();
        comm.all_reduce_sum_f32("sum", &mut data, SOON).expect("all come");
        assert!(data
            .iter()
            .enumerate()
            .all(|(i, x)| *x == (i % 1000) as f32 * 6.0));
        let mut seed = vec![comm.rank() as u8];
        comm.broadcast("seed", 2, &mut seed, SOON).expect("all come");
        assert_eq!(seed, [2]);
        comm.barrier("end", SOON).expect("all come");
        drop(comm);
        world.shutdown().expect("all leave");
        println!("rank is done");
    });
    succeeded(output, 3);
}

/// Rank 1 lives but does not come; rank 0 says so by name and in time, and messages still flow.
#[test]
fn an_absent_rank_is_named() {
    let output = on_mpi("an_absent_rank_is_named", 2, |world| {
        let comm = world.comm.clone();
        if comm.rank() == 0 {
            let error = comm
                .barrier("checkpoint", Duration::from_millis(300))
                .expect_err("rank 1 is away");
            assert!(
                matches!(&error, CommError::Deadline { missing, .. } if *missing == [1]),
                "{error}"
            );
            comm.send(1, Tag::CONTROL, Bytes::from_static(b"go on"))
                .expect("sent");
        } else {
            let inbox = comm.inbox(0, Tag::CONTROL).expect("free");
            assert_eq!(inbox.recv(SOON).expect("it arrives")[..], b"go on"[..]);
        }
        drop(comm);
        world.shutdown().expect("all leave");
        println!("rank is done");
    });
    succeeded(output, 2);
}

/// A rank that aborts takes the others with it: nobody holds the nodes of a broken run.
#[test]
fn abort_ends_all_ranks() {
    let output = on_mpi("abort_ends_all_ranks", 2, |world| {
        world.comm.barrier("start", SOON).expect("all come");
        if world.comm.rank() == 1 {
            world.abort(7);
        }
        let never = world
            .comm
            .inbox(1, Tag::CONTROL)
            .expect("free")
            .recv(Duration::from_secs(600));
        println!("rank 0 survived: {never:?}");
    });
    let Some(output) = output else { return };
    assert!(!output.status.success());
    assert!(!text(&output).contains("rank 0 survived"), "{}", text(&output));
}

/// Rank 0 generates on rank 1's engine, gives it new weights larger than a bucket, and generates again.
#[test]
fn an_engine_on_another_rank() {
    let output = on_mpi("an_engine_on_another_rank", 2, |world| {
        let comm = world.comm.clone();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let config = RemoteConfig {
            bucket_bytes: 1 << 20,
            ..RemoteConfig::default()
        };
        if comm.rank() == 1 {
            let engine = Arc::new(double::Double::default());
            let server = EngineServer::new(comm, 0, engine, runtime.handle().clone(), config).expect("free");
            assert_eq!(server.run().expect("stopped"), ServerEnd::Stopped);
        } else {
            let engine = RemoteEngine::connect(comm, 1, config).expect("the same program");
            generate(&*engine, 0);
            let tensor = WeightTensor {
                name: "w".to_owned(),
                dtype: DType::F32,
                shape: vec![1_500_000],
                data: pattern(3, 6_000_000),
            };
            let update = Arc::new(WeightUpdate::new(PolicyVersion(1), vec![tensor]));
            let ack = runtime
                .block_on(engine.update_weights(update.clone()))
                .expect("taken");
            assert_eq!(ack.checksum, update.checksum);
            generate(&*engine, 1);
            engine.stop();
        }
        world.shutdown().expect("all leave");
        println!("rank is done");
    });
    succeeded(output, 2);
}

fn generate(engine: &dyn Engine, version: u32) {
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let request = GenerateRequest {
        id: RequestId(u64::from(version)),
        session: SessionId::from("session"),
        prompt: vec![8, 200].into(),
        sampling: SamplingParams::default(),
        stop_token_ids: Vec::new(),
        max_new_tokens: 50,
        routing_from: None,
    };
    engine.submit(request, sender);
    let mut ids = Vec::new();
    while let EngineEvent::Tokens(tokens) = events.blocking_recv().expect("it ends") {
        assert!(tokens.iter().all(|t| t.version == PolicyVersion(version)));
        ids.extend(tokens.iter().map(|t| t.id));
    }
    assert_eq!(ids, (201..=250).collect::<Vec<u32>>());
}
