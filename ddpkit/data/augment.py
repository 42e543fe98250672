"""Which augmentation --augment names."""

from collections.abc import Collection, Mapping

from torchvision.transforms import v2

from ddpkit.errors import UserError

OF_COLORS = (v2.TrivialAugmentWide, v2.RandAugment, v2.ColorJitter, v2.RandomGrayscale)


def choose(
    table: Mapping[str, v2.Transform], text: str, channels: int | None, others: Collection[str] = ()
) -> v2.Transform | None:
    """Return what applies those of `table` that `text` names, A,B,..., in that order; None: none.

    channels: of the images, if they are not RGB. others: names in `text` that are for other code.

    Raises a UserError for an unknown name, or one that does not take so many channels.

        augment = ddpkit.choose({"vflip": v2.RandomVerticalFlip()}, args.augment, None)
    """
    names = [name for name in text.split(",") if name and name not in others]
    for name in names:
        if name not in table:
            raise UserError(f"--augment {name}: is none of {', '.join([*table, *others])}")
        if isinstance(table[name], OF_COLORS) and channels not in (None, 1, 3):
            raise UserError(f"--augment {name}: takes 1 or 3 channels, not {channels}")
    return v2.Compose([*(table[name] for name in names), v2.ToPureTensor()]) if names else None
