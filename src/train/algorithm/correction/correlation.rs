//! Correlation of the probabilities that engine and trainer give to the sampled tokens.

/// Pearson correlation of pairs, accumulated in f64 around a running mean; verl's
/// `rollout_actor_probs_pearson_corr` over probabilities.
#[derive(Clone, Copy, Debug, Default)]
pub struct Correlation {
    count: f64,
    mean: (f64, f64),
    square: (f64, f64),
    product: f64,
}

impl Correlation {
    /// Adds a pair.
    pub fn add(&mut self, x: f64, y: f64) {
        self.count += 1.0;
        let (dx, dy) = (x - self.mean.0, y - self.mean.1);
        self.mean.0 += dx / self.count;
        self.mean.1 += dy / self.count;
        self.square.0 += dx * (x - self.mean.0);
        self.square.1 += dy * (y - self.mean.1);
        self.product += dx * (y - self.mean.1);
    }

    /// Pairs so far.
    pub fn count(&self) -> u64 {
        self.count as u64
    }

    /// The coefficient; `None` where it is not defined (fewer than two pairs, or one side constant).
    pub fn coefficient(&self) -> Option<f64> {
        let scale = (self.square.0 * self.square.1).sqrt();
        (self.count >= 2.0 && scale > 0.0).then(|| self.product / scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlation_by_hand() {
        let mut c = Correlation::default();
        assert_eq!(c.coefficient(), None);
        for (x, y) in [(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.0)] {
            c.add(x, y);
        }
        // Deviations (-1.5,-.5,.5,1.5) and (-.5,-1.5,1.5,.5): products 3, squares 5 and 5.
        assert!((c.coefficient().unwrap() - 0.6).abs() < 1e-12);
        assert_eq!(c.count(), 4);
        let mut constant = Correlation::default();
        constant.add(1.0, 2.0);
        constant.add(1.0, 3.0);
        assert_eq!(constant.coefficient(), None);
    }
}
