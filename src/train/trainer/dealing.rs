//! Which rank computes which sequences.
//!
//! Sequences go to the ranks (or groups of ranks that share a sequence) longest first, each to the one that
//! has the fewest tokens; every rank then packs its own into micro-batches. Ranks with fewer micro-batches
//! get empty ones, because all ranks take part in every pass. All ranks deal alike, from the same lengths.
//!
//! Tokens are balanced and not their squares: memory and the number of micro-batches follow tokens, and in every
//! micro-batch all ranks gather every layer, so that a rank with fewer ones waits. Causal attention over T tokens adds
//! T / (12 H) to the other products of a layer of hidden size H (12 H² weights), which is less than they are up to
//! T = 12 H.
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
            let indices = self.by_rank[rank].iter().flatten();
            let mut found: Vec<Vec<f64>> = Vec::new();
            let mut rest = &numbers[..];
            let wrong = |problem: String| TrainError::Shared {
                phase: phase.to_owned(),
                rank,
                problem,
            };
            while !rest.is_empty() {
                let (column, tail) = first_column(rest).map_err(wrong)?;
                found.push(column.to_vec());
                rest = tail;
            }
            let mut found = found.into_iter();
            for &index in indices {
                for column in columns(&mut items[index]) {
                    let missing = || wrong(format!("no numbers for sequence {index}"));
                    *column = found.next().ok_or_else(missing)?;
                }
            }
            if found.len() > 0 {
                return Err(wrong(format!("{} columns too many", found.len())));
            }
        }
        Ok(())
    }
}

/// A column behind its length, and what follows it.
fn first_column(numbers: &[f64]) -> Result<(&[f64], &[f64]), String> {
    let cut = numbers.split_first().and_then(|(length, rest)| {
        let whole = *length >= 0.0 && length.fract() == 0.0;
        whole.then(|| rest.split_at_checked(*length as usize)).flatten()
    });
    cut.ok_or_else(|| {
        let length = numbers.first().copied().unwrap_or_default();
        format!(
            "a column of {length} numbers, of which {} are there",
            numbers.len().saturating_sub(1)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_as_long_as_it_says() {
        let numbers = [2.0, 0.5, 0.25, 0.0, 7.0];
        let (first, rest) = first_column(&numbers).unwrap();
        assert_eq!((first, rest), (&numbers[1..3], &numbers[3..]));
        let (empty, rest) = first_column(rest).unwrap();
        assert_eq!((empty, rest), (&[][..], &[7.0][..]));
        assert_eq!(
            first_column(rest).unwrap_err(),
            "a column of 7 numbers, of which 0 are there"
        );
        for wrong in [-1.0, 0.5, f64::NAN] {
            assert!(first_column(&[wrong, 1.0]).is_err());
        }
    }

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
