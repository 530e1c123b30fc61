//! The communicator contract in worlds of threads. `tests/cpu/mpi.rs` runs the same under `mpirun`.

use super::{inprocess, single, CommError, Communicator, InboxError, Tag};
use bytes::Bytes;
use std::{sync::Arc, thread, time::Duration};

const SOON: Duration = Duration::from_secs(20);

/// Runs `body` on every rank of a world, and returns what the ranks returned.
fn on_ranks<R: Send + 'static>(
    size: u32,
    body: impl Fn(Arc<dyn Communicator>) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let body = Arc::new(body);
    let threads: Vec<_> = inprocess::world(size)
        .into_iter()
        .map(|comm| {
            let body = body.clone();
            thread::spawn(move || body(comm))
        })
        .collect();
    threads
        .into_iter()
        .map(|t| t.join().expect("the rank ends"))
        .collect()
}

#[test]
fn messages_wait_for_their_inbox_and_keep_their_order() {
    let world = inprocess::world(2);
    for i in 0..10u8 {
        world[0]
            .send(1, Tag::CONTROL, Bytes::from(vec![i]))
            .expect("sent");
        world[1]
            .send(1, Tag::CONTROL, Bytes::from(vec![100 + i]))
            .expect("to itself");
    }
    let inbox = world[1].inbox(0, Tag::CONTROL).expect("free");
    let own = world[1].inbox(1, Tag::CONTROL).expect("free");
    for i in 0..10u8 {
        assert_eq!(inbox.recv(SOON).expect("there")[..], [i]);
        assert_eq!(own.recv(SOON).expect("there")[..], [100 + i]);
    }
    assert_eq!(inbox.recv(Duration::ZERO), Err(InboxError::Timeout));
    assert!(matches!(
        world[1].inbox(0, Tag::CONTROL),
        Err(CommError::InboxTaken { .. })
    ));
    assert!(matches!(
        world[1].send(2, Tag::CONTROL, Bytes::new()),
        Err(CommError::NoSuchRank { rank: 2, size: 2 })
    ));
}

/// Terms of very different size and both signs.
fn uneven(i: u32, rank: u32) -> f64 {
    let sign = f64::from((rank + i) % 3) - 1.0;
    sign * 1e15 + f64::from((i * 7919 + rank * 104_729) % 1_000_003) * 1e-3
}

#[test]
fn sums_are_exact_and_the_same_on_every_rank() {
    for size in [1u32, 2, 3, 5] {
        let results = on_ranks(size, move |comm| {
            let rank = comm.rank();
            let mut single: Vec<f32> = (0..1003).map(|i| (i * (rank + 1)) as f32).collect();
            comm.all_reduce_sum_f32("gradients", &mut single, SOON)
                .expect("all come");
            // Values whose sum depends on the order in which it is taken.
            let mut double: Vec<f64> = (0..70).map(|i| uneven(i, rank)).collect();
            comm.all_reduce_sum_f64("norm", &mut double, SOON)
                .expect("all come");
            let mut none: [f32; 0] = [];
            comm.all_reduce_sum_f32("nothing", &mut none, SOON)
                .expect("all come");
            (single, double)
        });
        let factor = (1..=size).sum::<u32>();
        for (single, double) in &results {
            assert!(single
                .iter()
                .enumerate()
                .all(|(i, x)| *x == (i as u32 * factor) as f32));
            let in_rank_order: Vec<f64> = (0..70)
                .map(|i| (0..size).fold(0.0, |sum, rank| sum + uneven(i, rank)))
                .collect();
            assert_eq!(*double, in_rank_order);
        }
    }
}

#[test]
fn a_broadcast_larger_than_a_part_arrives_whole() {
    let bytes: Vec<u8> = (0..super::collective::PART_BYTES * 2 + 77)
        .map(|i| (i % 251) as u8)
        .collect();
    let results = on_ranks(3, {
        let bytes = bytes.clone();
        move |comm| {
            let mut data = if comm.rank() == 1 {
                bytes.clone()
            } else {
                vec![9; 3]
            };
            comm.broadcast("weights", 1, &mut data, SOON).expect("all come");
            data
        }
    });
    assert!(results.iter().all(|data| *data == bytes));
}

#[test]
fn a_missing_rank_is_named_and_the_world_is_over() {
    let results = on_ranks(4, |comm| {
        if comm.rank() == 2 {
            return None;
        }
        let error = comm
            .barrier("checkpoint", Duration::from_millis(200))
            .expect_err("rank 2 is away");
        let after = comm.barrier("next", SOON).expect_err("the world is over");
        Some((error, after))
    });
    for (rank, result) in results.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let (error, after) = result.as_ref().expect("it was there");
        let CommError::Deadline {
            rank: r,
            phase,
            missing,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (*r as usize, phase.as_str(), &missing[..]),
            (rank, "checkpoint", &[2][..])
        );
        assert!(error.to_string().contains("for rank 2"), "{error}");
        assert!(matches!(after, CommError::Broken { failed, .. } if failed == "checkpoint"));
    }
}

#[test]
fn ranks_in_different_phases_see_both_places() {
    let results = on_ranks(2, |comm| {
        let phase = if comm.rank() == 0 { "save" } else { "evaluate" };
        comm.barrier(phase, SOON)
            .expect_err("the phases differ")
            .to_string()
    });
    assert!(
        results[0].contains("`save`") && results[0].contains("`evaluate`"),
        "{results:?}"
    );
    assert!(results[1].contains("rank 0 is in phase `save`"), "{results:?}");
}

#[test]
fn different_lengths_are_an_error() {
    let results = on_ranks(2, |comm| {
        let mut data = vec![1.0f32; 10 + 10 * comm.rank() as usize];
        comm.all_reduce_sum_f32("gradients", &mut data, Duration::from_millis(500))
    });
    assert!(results.iter().all(|r| r.is_err()));
    assert!(results
        .iter()
        .any(|r| matches!(r, Err(CommError::Mismatch { .. }))));
}

#[test]
fn a_world_of_one_needs_nobody() {
    let comm = single();
    assert_eq!((comm.rank(), comm.size()), (0, 1));
    comm.barrier("start", Duration::ZERO).expect("alone");
    let mut data = [1.5f32, 2.5];
    comm.all_reduce_sum_f32("sum", &mut data, Duration::ZERO)
        .expect("alone");
    assert_eq!(data, [1.5, 2.5]);
    let mut bytes = vec![1, 2];
    comm.broadcast("seed", 0, &mut bytes, Duration::ZERO)
        .expect("alone");
    assert_eq!(bytes, [1, 2]);
}
