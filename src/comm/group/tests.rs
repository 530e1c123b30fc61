//! Groups in worlds of threads.

use super::*;
use crate::comm::inprocess;

const SOON: Duration = Duration::from_secs(20);

fn f32s(values: &mut [f32]) -> Memory {
    Memory {
        address: values.as_mut_ptr().cast(),
        count: values.len(),
        element: Element::F32,
    }
}

/// Runs `body` on every rank of a world of threads, in a group of all of them.
fn on_threads(size: u32, body: impl Fn(Arc<dyn Collectives>) + Sync) {
    let members: Vec<u32> = (0..size).collect();
    std::thread::scope(|scope| {
        for comm in inprocess::world(size) {
            let (members, body) = (&members, &body);
            scope.spawn(move || body(group(comm, members, Tag::group(0), SOON).unwrap()));
        }
    });
}

#[test]
fn every_operation_gives_what_its_table_says() {
    on_threads(3, |group| {
        let me = group.place();
        let mut own = [me as f32, 10.0 + me as f32];
        let mut all = [0.0; 6];
        let mut both: Vec<f32> = (0..6).map(|i| (i * (me + 1)) as f32).collect();
        let mut part = [0.0; 2];
        // To rank p go 2p copies of this rank's number: nothing to the first.
        let counts = [0, 2, 4];
        let mut runs = [me as f32; 6];
        let expected = vec![2 * me; 3];
        let mut arrived = vec![0.0; 6 * me];
        let mut total = [0.1 * me as f64];
        // SAFETY: all of it lives until the handles are waited for.
        let handles = unsafe {
            [
                group.all_gather("gather", f32s(&mut own), f32s(&mut all)),
                group.reduce_scatter("scatter", f32s(&mut both), f32s(&mut part)),
                group.all_to_all(
                    "exchange",
                    f32s(&mut runs),
                    &counts,
                    f32s(&mut arrived),
                    &expected,
                ),
                group.all_reduce("sum", Memory::of_f64(&mut total)),
            ]
        };
        // In another order than they were started in.
        for handle in handles.into_iter().rev() {
            handle.unwrap().wait().unwrap();
        }
        assert_eq!(all, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(part, [12.0 * me as f32, 6.0 * (2 * me + 1) as f32]);
        let want: Vec<f32> = (0..3).flat_map(|from| vec![from as f32; 2 * me]).collect();
        assert_eq!(arrived, want);
        // In rank order, so exactly this.
        assert_eq!(total, [0.0 + 0.1 + 0.2]);
    });
}

#[test]
fn large_data_travels_in_parts_and_bf16_is_summed_in_f32() {
    on_threads(2, |group| {
        let count = 2 * PART_BYTES / 4 + 3;
        let mut own = vec![group.place() as f32 + 1.0; count];
        let mut all = vec![0.0; 2 * count];
        // SAFETY: both live until the handle is waited for.
        let handle = unsafe { group.all_gather("large", f32s(&mut own), f32s(&mut all)) };
        handle.unwrap().wait().unwrap();
        assert!(all[..count].iter().all(|x| *x == 1.0) && all[count..].iter().all(|x| *x == 2.0));
        let mut narrow = [half::bf16::from_f32(256.0 + 2.0 * group.place() as f32)];
        let memory = Memory {
            address: narrow.as_mut_ptr().cast(),
            count: 1,
            element: Element::Bf16,
        };
        // SAFETY: it lives until the handle is waited for.
        unsafe { group.all_reduce("narrow", memory) }
            .unwrap()
            .wait()
            .unwrap();
        // 514 lies between two numbers of bf16; the even one is taken.
        assert_eq!(narrow[0].to_f32(), 512.0);
    });
}

#[test]
fn an_absent_rank_and_another_phase_are_named() {
    let mut world = inprocess::world(2);
    let other = world.pop().unwrap();
    let short = Duration::from_millis(50);
    let here = group(world.pop().unwrap(), &[0, 1], Tag::group(0), short).unwrap();
    let mut own = [1.0f32];
    // SAFETY: it lives until the handle is waited for.
    let wait = |own: &mut [f32]| unsafe { here.all_reduce("norm", f32s(own)) }.unwrap().wait();
    let error = wait(&mut own).unwrap_err();
    assert!(
        matches!(&error, CommError::Deadline { missing, .. } if *missing == [1]),
        "{error}"
    );
    let there = group(other, &[0, 1], Tag::group(0), short).unwrap();
    let mut theirs = [1.0f32];
    for phase in ["norm", "loss"] {
        // SAFETY: nobody waits for it.
        drop(unsafe { there.all_reduce(phase, f32s(&mut theirs)) });
    }
    let error = wait(&mut own).unwrap_err().to_string();
    assert!(error.contains("`norm`") && error.contains("`loss`"), "{error}");
}

#[test]
fn groups_of_some_ranks_do_not_see_each_other() {
    std::thread::scope(|scope| {
        for comm in inprocess::world(4) {
            scope.spawn(move || {
                let rank = comm.rank();
                let rows = [2 * (rank / 2), 2 * (rank / 2) + 1];
                let columns = [rank % 2, rank % 2 + 2];
                let row = group(comm.clone(), &rows, Tag::group(0), SOON).unwrap();
                let column = group(comm, &columns, Tag::group(1), SOON).unwrap();
                let mut sums = [f64::from(rank); 2];
                let (a, b) = sums.split_at_mut(1);
                // SAFETY: both live until the handles are waited for.
                let (a, b) = unsafe {
                    (
                        row.all_reduce("row", Memory::of_f64(a)),
                        column.all_reduce("column", Memory::of_f64(b)),
                    )
                };
                b.unwrap().wait().unwrap();
                a.unwrap().wait().unwrap();
                assert_eq!(
                    sums,
                    [f64::from(rows[0] + rows[1]), f64::from(columns[0] + columns[1])]
                );
            });
        }
    });
}
