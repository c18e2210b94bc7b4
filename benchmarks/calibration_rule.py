"""How well a rule that chooses a pooling from 500 images does on the others: rules of `calibrate`, compared.

    python -m benchmarks.calibration_rule --data DIRECTORY

Protocol, written down before any rule was run:

- **Choosing the rule**: EfficientNet-Lite0 on the ImageNet photos of even classes (plain, 384 px, and small objects:
  half the side on another photo, blurred or sharp), and the Tiny-ImageNet ResNet-18 (plain). Any number of looks is
  allowed.
- **The run that counts**: ResNet-50 on the photos of odd classes, the same tasks, once, after the rule is committed.
- **Draws**: 40 random draws of 500 images to fit on; all others judge. Draws overlap, so the standard errors of their
  means are those of the images, not those of 40 independent experiments.
- **Candidates**: average pooling; ROTP on a grid of feature scale, temperature and norm power; GeM and the mean
  weighted by the norm prior, on a grid of powers; the mean and the maximum. All have a gain that is fitted with them.
- **Rules**, each of which sees the 500 images alone:
  *halves* (0.2): the least loss on one half, made milder within a standard error, judged on the other half, and back;
  accepted if the loss falls by a standard error + 0.001 and top-1 does not fall by more than one.
  *cross-fit*: losses held out by 10 random splits; settings that lower a smoothed top-1, the logistic of the margin
  of the right logit over the best wrong one, are discarded; of the rest the mildest within a standard error of the
  least loss.
  *two errors*: the same, and the mean stays unless the smoothed top-1 rises by two standard errors.
  *smoothed top-1*: the mildest within a standard error of the highest smoothed top-1, if that rises by two.
  *lower bound*: the highest smoothed top-1 minus two standard errors of its difference to the mean, if positive.
- **What is read**: on the others, top-1 minus that of average pooling and of GeM + gain, and cross-entropy minus that
  of average + gain; how often the promised difference is within two standard errors of what the others show.
- **Goals** of the run that counts: plain photos: mean top-1 at least −0.2 points from average pooling, no draw below
  −0.8, mean loss no higher than average + gain; small objects: at least 3 points over GeM + gain; promises kept in 90
  % of draws.
"""
