//! Cutting sequences into micro-batches of bounded size.

/// Groups `(index, tokens)` pairs, in order, so that the tokens of a group are at most `budget`; a longer
/// sequence is a group of its own. Every index appears once.
pub(super) fn pack(lengths: &[(usize, usize)], budget: usize) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for &(index, tokens) in lengths {
        match groups.last_mut().filter(|_| tokens <= room) {
            Some(group) => {
                group.push(index);
                room -= tokens;
            }
            None => {
                groups.push(vec![index]);
                room = budget.saturating_sub(tokens);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fills_up_to_the_budget_and_lets_long_ones_go_alone() {
        let lengths = [(5, 4), (6, 6), (7, 1), (8, 25), (9, 9), (2, 1)];
        assert_eq!(pack(&lengths, 10), [vec![5, 6], vec![7], vec![8], vec![9, 2]]);
        assert!(pack(&[], 10).is_empty());
    }

    proptest! {
        #[test]
        fn every_sequence_once_and_never_above_the_budget(
            tokens in prop::collection::vec(1usize..50, 0..40), budget in 1usize..100
        ) {
            let lengths: Vec<_> = tokens.iter().copied().enumerate().collect();
            let groups = pack(&lengths, budget);
            let flat: Vec<usize> = groups.iter().flatten().copied().collect();
            prop_assert_eq!(flat, (0..tokens.len()).collect::<Vec<_>>());
            for group in groups {
                let sum: usize = group.iter().map(|i| tokens[*i]).sum();
                prop_assert!(sum <= budget || group.len() == 1);
            }
        }
    }
}
