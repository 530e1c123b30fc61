//! Which rank computes which sequences.
//!
//! Sequences go to the ranks (or groups of ranks that share a sequence) longest first, each to the one that
//! has the fewest tokens; every rank then packs its own into micro-batches. Ranks with fewer micro-batches
//! get empty ones, because all ranks take part in every pass. All ranks deal alike, from the same lengths.
//!
//! What a rank computes for its sequences is plain numbers, and every rank needs all of them:
//! [`Dealt::share`] hands them round.

use super::{mesh::Mesh, packing::pack, TrainError};

/// Micro-batches of all ranks.
pub(super) struct Dealt {
    by_rank: Vec<Vec<Vec<usize>>>,
    own: usize,
}

/// Deals `(index, tokens)` pairs. `budget` is that of the tokens of a micro-batch on one rank.
pub(super) fn deal(lengths: &[(usize, usize)], budget: usize, mesh: Option<&Mesh>) -> Dealt {
    match mesh {
        None => Dealt {
            by_rank: vec![pack(lengths, budget)],
            own: 0,
        },
        Some(mesh) => Dealt {
            by_rank: deal_to(lengths, budget * mesh.sequence.ranks(), mesh.data.ranks()),
            own: mesh.data.index(),
        },
    }
}

fn deal_to(lengths: &[(usize, usize)], budget: usize, ranks: usize) -> Vec<Vec<Vec<usize>>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    // Stable, so that equal lengths go in their order.
    order.sort_by_key(|&i| std::cmp::Reverse(lengths[i].1));
    let mut tokens = vec![0; ranks];
    let mut rank_of = vec![0; lengths.len()];
    for i in order {
        let rank = (0..ranks).min_by_key(|&rank| tokens[rank]).unwrap_or(0);
        rank_of[i] = rank;
        tokens[rank] += lengths[i].1;
    }
    let mut by_rank: Vec<Vec<Vec<usize>>> = (0..ranks)
        .map(|rank| {
            let own = lengths.iter().zip(&rank_of).filter(|(_, r)| **r == rank);
            pack(&own.map(|(pair, _)| *pair).collect::<Vec<_>>(), budget)
        })
        .collect();
    let rounds = by_rank.iter().map(Vec::len).max().unwrap_or(0);
    by_rank
        .iter_mut()
        .for_each(|batches| batches.resize(rounds, Vec::new()));
    by_rank
}

impl Dealt {
    /// This rank's micro-batches; as many as every other rank's.
    pub(super) fn own(&self) -> &[Vec<usize>] {
        &self.by_rank[self.own]
    }

    /// Sets the columns of the sequences that other ranks computed. `items` has one entry an index.
    pub(super) fn share<T>(
        &self,
        phase: &str,
        mesh: Option<&Mesh>,
        items: &mut [T],
        columns: impl Fn(&mut T) -> Vec<&mut Vec<f64>>,
    ) -> Result<(), TrainError> {
        let Some(mesh) = mesh else {
            return Ok(());
        };
        // Every column behind its length.
        let mut own = Vec::new();
        for &index in self.own().iter().flatten() {
            for column in columns(&mut items[index]) {
                own.push(column.len() as f64);
                own.extend_from_slice(column);
            }
        }
        let ones = vec![1; self.by_rank.len()];
        let lengths = mesh.data.gather_numbers(phase, &[own.len() as f64], &ones)?;
        let lengths: Vec<usize> = lengths.iter().map(|length| length[0] as usize).collect();
        let all = mesh.data.gather_numbers(phase, &own, &lengths)?;
        for (rank, numbers) in all.iter().enumerate().filter(|(rank, _)| *rank != self.own) {
            let mut rest = &numbers[..];
            for &index in self.by_rank[rank].iter().flatten() {
                for column in columns(&mut items[index]) {
                    let (length, tail) = rest.split_first().unwrap_or((&0.0, &[]));
                    let (values, tail) = tail.split_at(*length as usize);
                    *column = values.to_vec();
                    rest = tail;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_about_the_same_tokens_and_the_same_number_of_micro_batches() {
        // Longest first: 10 to rank 0, 9 to rank 1, 4 to rank 1, 4 to rank 0, 3 to rank 1.
        let lengths = [(3, 10), (4, 4), (5, 4), (6, 3), (7, 9)];
        let dealt = deal_to(&lengths, 14, 2);
        assert_eq!(dealt, [vec![vec![3, 5], vec![]], vec![vec![4, 6], vec![7]]]);
        let few = deal_to(&[(0, 5)], 10, 3);
        assert_eq!(few, [vec![vec![0]], vec![vec![]], vec![vec![]]]);
        assert_eq!(deal_to(&[], 10, 2), [Vec::<Vec<usize>>::new(), Vec::new()]);
    }
}
